"""One response of a realtime session: from what is said to the events that tell of it, in their order."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Literal, Protocol

from msgspec import Struct

from mmserve.core.errors import MMServeError
from mmserve.core.messages import Usage
from mmserve.parsing.events import CallArguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning
from mmserve.server.errors import error_body, told
from mmserve.server.realtime_events import Teller
from mmserve.server.realtime_items import Fields, new_id
from mmserve.server.spoken import new_call_id

log = logging.getLogger("mmserve.server")

CancelReason = Literal["client_cancelled", "turn_detected"]


class Place(Protocol):
    """Where the items of a response stand."""

    def enter(self, shown: Fields) -> str | None:
        """Put an item that begins at the end; what is before it."""

    def settle(self, shown: Fields) -> None:
        """Let an item that has ended be what was said."""


class Said(Struct):
    """A piece of an answer. ``age_ms`` and ``frame_seq`` are of the newest frame that it could know of;
    ``finish`` is why it ended, in the last piece alone."""

    events: list[Event]
    usage: Usage
    finish: str | None = None
    age_ms: float | None = None
    frame_seq: int | None = None

    @property
    def sight(self) -> Fields:
        return {"age_ms": self.age_ms, "frame_seq": self.frame_seq}


class Response:
    """Runs once, as a task. ``said`` is the answer in pieces; closing it aborts it in the engine.

    Every response that was created is told to be done, however it ends: completed, incomplete, cancelled or
    failed. Its items enter ``place`` unless ``conversation_id`` is None, which is out of band. ``created`` is
    called behind ``response.created``, ``ended`` when nothing more will be told.
    """

    def __init__(
        self,
        tell: Teller,
        said: AsyncGenerator[Said, None],
        *,
        conversation_id: str | None,
        max_output_tokens: int | str,
        metadata: dict[str, str] | None,
        place: Place,
        created: Callable[[], None],
        ended: Callable[["Response"], None],
        tell_age: bool = False,
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex[:24]}"
        self.conversation_id = conversation_id
        self.ended = asyncio.Event()
        self._created, self._when_ended = created, ended
        self._said = said
        self._teller = tell
        self._max_output_tokens, self._metadata = max_output_tokens, metadata
        self._usage: Usage | None = None
        self._first: Said | None = None
        self._tell_age = tell_age
        self._why: CancelReason | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = False
        self.speech = Speech(self._tell, None if conversation_id is None else place)

    def begin(self, after: "Response | None" = None) -> None:
        """Start, or wait until ``after`` has ended and start then."""
        self._task = asyncio.create_task(self._run(after))

    def cancel(self, why: CancelReason) -> None:
        """End it within a step; what was said so far stays."""
        if self._why is None and not self.ended.is_set():
            self._why = why
            if self._task is not None and self._started:
                self._task.cancel()

    async def stop(self) -> None:
        """End it without a word: nobody is there any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._finish()

    async def _run(self, after: "Response | None") -> None:
        begun, self._started = False, True
        try:
            if self._why is not None:
                raise asyncio.CancelledError  # before its first step, in which it would have run past this
            if after is not None:
                await after.ended.wait()
            begun = True
            self._begin()
            await self._speak()
        except asyncio.CancelledError:
            if self._why is None:
                raise  # the socket has ended; nobody is there to be told
            if not begun:
                self._begin()
            self._end("cancelled", reason=self._why)
        except Exception as error:
            if not isinstance(error, MMServeError):
                log.exception("response %s failed", self.id)
            self._end("failed", error=told(error))
        finally:
            self._finish()

    def _begin(self) -> None:
        self._teller.tell("response.created", response=self._body("in_progress"))
        self._created()

    def _finish(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._when_ended(self)

    async def _speak(self) -> None:
        last: Said | None = None
        async with aclosing(self._said) as pieces:
            async for last in pieces:
                self._first, self._usage = self._first or last, last.usage
                for event in last.events:
                    self.speech.take(event, last.sight if self._tell_age else None)
        match last.finish if last else None:
            case "cut":
                self._end("cancelled", reason="turn_detected")
            case "cancelled":
                self._end("cancelled", reason="client_cancelled")
            case "length":
                self._end("incomplete", reason="max_output_tokens")
            case _:
                self._end("completed")

    def _end(self, status: str, reason: str | None = None, error: MMServeError | None = None) -> None:
        ended = "completed" if status == "completed" else "incomplete"
        self.speech.finish(ended, begin=status in ("completed", "incomplete"))
        details: Fields = {"type": status}
        if reason is not None:
            details["reason"] = reason
        if error is not None:
            body = error_body(error)["error"]
            details["error"] = {name: body[name] for name in ("type", "code", "message", "param")}
        self._teller.tell("response.done", response=self._body(status, details))

    def _tell(self, kind: str, **fields: Any) -> None:
        """An event of this response; those of the conversation do not name it."""
        if kind.startswith("response."):
            fields = {"response_id": self.id, **fields}
        self._teller.tell(kind, **fields)

    def _body(self, status: str, details: Fields | None = None) -> Fields:
        body: Fields = {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": self.speech.items,
            "conversation_id": self.conversation_id,
            "output_modalities": ["text"],
            "max_output_tokens": self._max_output_tokens,
            "usage": None if self._usage is None else _usage(self._usage),
            "metadata": self._metadata,
        }
        if self._first is not None and self._first.frame_seq is not None:
            body["mmserve"] = self._first.sight
        return body


class Speech:
    """The items of a response in the making: messages and calls in the order in which they are said.

    ``items`` are all that was begun; the last may be open. Thoughts are not told: the protocol has no place
    for them. A call that broke stays, as incomplete; what was said of it follows as a message.
    """

    def __init__(self, tell: Callable[..., None], place: Place | None) -> None:
        self.items: list[Fields] = []
        self._tell, self._place = tell, place
        self._before: str | None = None  # the item before the open one
        self._open = False
        self._texts: list[str] = []

    def take(self, event: Event, sight: Fields | None = None) -> None:
        """Tell what comes next; ``sight`` goes with a text."""
        if isinstance(event, Content):
            self._text(event.text, sight)
        elif isinstance(event, CallBegin):
            self._close()
            self._begin(_call(event.name))
        elif isinstance(event, CallArguments):
            self._texts.append(event.text)
            call_id = self.items[-1]["call_id"]
            self._of_item("response.function_call_arguments.delta", call_id=call_id, delta=event.text)
        elif isinstance(event, CallEnd | CallBroken):
            self._close("completed" if isinstance(event, CallEnd) else "incomplete")
        else:
            assert isinstance(event, Reasoning)

    def finish(self, status: str, begin: bool) -> None:
        """End what is open. With ``begin`` an answer of nothing is an empty message."""
        if begin and not self.items:
            self._text("", None)
        self._close(status)

    def _text(self, text: str, sight: Fields | None) -> None:
        if not self._open or self.items[-1]["type"] != "message":
            self._close()
            self._begin(_message())
            self._of_part("response.content_part.added", part={"type": "text", "text": ""})
        if text:
            self._texts.append(text)
            beside = {} if sight is None else {"mmserve": sight}
            self._of_part("response.output_text.delta", delta=text, **beside)

    def _begin(self, item: Fields) -> None:
        self.items.append(item)
        self._open = True
        self._tell("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if self._place is not None:
            self._before = self._place.enter(item)
            self._tell("conversation.item.added", previous_item_id=self._before, item=item)

    def _close(self, status: str = "completed") -> None:
        if not self._open:
            return
        item, text = self.items[-1], "".join(self._texts)
        item["status"], self._open, self._texts = status, False, []
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"call_id": item["call_id"], "name": item["name"], "arguments": text}
            self._of_item("response.function_call_arguments.done", **done)
        else:
            item["content"] = [{"type": "output_text", "text": text}]
            self._of_part("response.output_text.done", text=text)
            self._of_part("response.content_part.done", part={"type": "text", "text": text})
        if self._place is not None:
            self._place.settle(item)
            self._tell("conversation.item.done", previous_item_id=self._before, item=item)
        self._tell("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> None:
        self._tell(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Any) -> None:
        self._of_item(kind, content_index=0, **fields)


def _message() -> Fields:
    return {**_item("message"), "role": "assistant", "content": []}


def _call(name: str) -> Fields:
    return {**_item("function_call"), "call_id": new_call_id(), "name": name, "arguments": ""}


def _item(kind: str) -> Fields:
    return {"id": new_id(), "object": "realtime.item", "type": kind, "status": "in_progress"}


def _usage(usage: Usage) -> Fields:
    seen = usage.image_tokens + usage.video_tokens
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - seen,
            "audio_tokens": 0,
            "image_tokens": seen,
            "cached_tokens": usage.cached_tokens,
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }
