"""The events of /v1/realtime: what a client may say, checked field by field, and what the server says.

Unknown fields are ignored, as OpenAI does; known ones that this server cannot honour are refused by name.
"""

import uuid
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from mmserve.core.errors import InvalidRequest, MMServeError
from mmserve.server.errors import unsupported
from mmserve.server.protocol import Positive, decode
from mmserve.server.responses import ReasoningFields
from mmserve.server.socket_door import error_text

Id = Annotated[str, Meta(min_length=1, max_length=64)]
MaxTokens = Positive | Literal["inf"]


class Outlet(Protocol):
    """Where the events of one conversation go: a websocket, or a data channel."""

    def send(self, text: str, echo: bool = False) -> None:
        """Queue one event, never waiting. An ``echo`` repeats what the client has sent."""

    async def room(self) -> None:
        """Return when no echo waits any more."""

    def end(self, code: int, reason: str) -> None:
        """Close, with a code of websockets, as soon as what is queued has left."""


# ---------------------------------------------------------------- what a client says


class AnswerFields(Struct, kw_only=True):
    """What a session sets for all its responses, and a response for itself. UNSET is not given."""

    instructions: str | UnsetType | None = UNSET
    output_modalities: list[str] | UnsetType | None = UNSET
    max_output_tokens: MaxTokens | UnsetType | None = UNSET
    tools: list[Any] | UnsetType | None = UNSET
    tool_choice: Any = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    reasoning: ReasoningFields | UnsetType | None = UNSET
    mmserve: dict[str, Any] | UnsetType | None = UNSET
    audio: Any = None
    prompt: Any = None

    def check(self, where: str) -> None:
        """InvalidRequest for what no session here can honour; ``where`` the fields stand."""
        if self.audio:
            raise unsupported(f"{where}.audio", f"{where}.audio: this server neither hears nor speaks")
        if self.prompt is not None:
            raise unsupported(f"{where}.prompt", f"{where}.prompt: no prompts are stored here")
        if self.output_modalities and self.output_modalities != ["text"]:
            raise unsupported(
                f"{where}.output_modalities", f'{where}.output_modalities must be ["text"]: answers are text'
            )


class TokenLimits(Struct, kw_only=True):
    post_instructions: Positive | None = None


class RetentionRatio(Struct, kw_only=True):
    """Where the conversation must be cut, the share of it that stays."""

    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: TokenLimits | None = None


Truncation = Literal["auto", "disabled"] | RetentionRatio


class SessionFields(AnswerFields, kw_only=True):
    type: str | UnsetType = UNSET
    model: str | None = None
    truncation: Truncation | UnsetType | None = UNSET
    tracing: Any = None
    include: list[str] | None = None

    def check(self, where: str) -> None:
        super().check(where)
        if self.type is not UNSET and self.type != "realtime":
            raise unsupported(
                f"{where}.type", f"{where}.type must be realtime; nothing else is transcribed or translated"
            )
        for name in ("tracing", "include"):
            if getattr(self, name):
                raise unsupported(f"{where}.{name}", f"{where}.{name} is not supported by this server")


class ResponseFields(AnswerFields, kw_only=True):
    conversation: Literal["auto", "none"] | None = None
    input: list[Any] | None = None
    metadata: dict[str, str] | None = None


class ClientEvent(Struct, kw_only=True):
    event_id: str | None = None


class SessionUpdate(ClientEvent, kw_only=True):
    session: SessionFields


class ItemCreate(ClientEvent, kw_only=True):
    item: dict[str, Any]
    previous_item_id: str | None = None


class ItemDelete(ClientEvent, kw_only=True):
    item_id: str


class ItemRetrieve(ClientEvent, kw_only=True):
    item_id: str


class ResponseCreate(ClientEvent, kw_only=True):
    response: ResponseFields | None = None


class ResponseCancel(ClientEvent, kw_only=True):
    response_id: str | None = None


CLIENT_EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.delete": ItemDelete,
    "conversation.item.retrieve": ItemRetrieve,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
_NO_AUDIO = "this server hears no audio: send input_text, input_image, or frames as binary messages"
_REFUSED = {
    **{f"input_audio_buffer.{verb}": _NO_AUDIO for verb in ("append", "commit", "clear")},
    "output_audio_buffer.clear": "this server makes no audio; response.cancel ends an answer",
    "conversation.item.truncate": "an answer of text is never ahead of its reader: delete the item,"
    " or cancel the response",
    "transcription_session.update": _NO_AUDIO,
}


class Head(Struct):
    """What an event must be before anything else of it is looked at."""

    type: Any = None
    event_id: Any = None


def read_head(text: str) -> Head:
    """The head of an event; InvalidRequest if it is no JSON object."""
    return _decoded(text, Head)


def read_event(text: str, head: Head) -> ClientEvent:
    """The whole event; InvalidRequest names what is wrong, or why there is none of this type here."""
    if head.event_id is not None and not isinstance(head.event_id, str):
        raise InvalidRequest("event_id must be a string", param="event_id")
    kind = head.type
    if not isinstance(kind, str):
        raise InvalidRequest("type must be a string that names the event", param="type")
    if kind in _REFUSED:
        raise unsupported("type", f"{kind}: {_REFUSED[kind]}")
    if kind not in CLIENT_EVENTS:
        raise InvalidRequest(
            f"type must be one of {', '.join(CLIENT_EVENTS)}, not {kind[:100]!r}", param="type"
        )
    return _decoded(text, CLIENT_EVENTS[kind])


def _decoded(text: str, kind: Any) -> Any:
    try:
        return decode(text, kind)
    except InvalidRequest as error:
        error.message = error.message.replace("the body", "the event", 1)
        raise


# ---------------------------------------------------------------- what the server says


class Teller:
    """Writes the server's events, each with an id of its own, and sends them."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._prefix = uuid.uuid4().hex[:16]
        self._count = 0

    def tell(self, kind: str, *, echo: bool = False, **fields: Any) -> None:
        body = {"type": kind, "event_id": self._id(), **fields}
        self._outlet.send(msgspec.json.encode(body).decode(), echo)

    def fault(self, error: MMServeError, about: Any = None) -> None:
        """An ``error`` event; ``about`` is the client's id of the event that was wrong."""
        self._outlet.send(error_text(error, about if isinstance(about, str) else None, self._id()))

    def _id(self) -> str:
        self._count += 1
        return f"event_{self._prefix}{self._count:x}"
