"""The items of a realtime conversation: as the client sees them, and as messages for the model."""

import asyncio
import base64
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from mmserve.chat_format import Loaded, MediaRef, media_refs, parse_messages
from mmserve.core.errors import InvalidRequest, MMServeError, NotFound
from mmserve.core.messages import ImagePart, Message, Seen, TextPart
from mmserve.media import MediaDesk, together
from mmserve.server.errors import unsupported
from mmserve.server.response_items import messages_of
from mmserve.server.tokenize import Tokenizing

MOST_ITEMS = 1024  # of a conversation; the oldest go
LONGEST_ID = 64
COUNTED = 32_768  # characters of which the tokens are counted; of more they are guessed
TURN_TOKENS = 6  # about what a chat template writes around a turn
_KINDS = ("message", "function_call", "function_call_output")
_ROLES = ("system", "user", "assistant")
_PARTS = {
    "system": ("input_text",),
    "user": ("input_text", "input_image"),
    "assistant": ("output_text",),
}
_HERE = "messages[0]"  # what the parser of chats calls the only message it is given

Fields = dict[str, Any]


class Item(Struct, kw_only=True):
    """``shown`` is the item as events tell it, pictures without their data; ``messages`` are its turns, none
    for what says nothing to the model. ``tokens`` is about what it has in a prompt, ``nbytes`` in memory."""

    id: str
    shown: Fields
    messages: tuple[Message, ...]
    tokens: int = 0
    nbytes: int = 0

    @property
    def pictures(self) -> int:
        return sum(isinstance(part, ImagePart) for m in self.messages for part in m.content)

    @property
    def words(self) -> str:
        return "\n".join(p.text for m in self.messages for p in m.content if isinstance(p, TextPart))

    def whole(self) -> Fields:
        """As it is told to who retrieves it: with the data of its pictures."""
        if not self.pictures:
            return self.shown
        pictures = iter([p for m in self.messages for p in m.content if isinstance(p, ImagePart)])
        content = [
            {**part, "image_url": part.get("image_url") or _data_url(next(pictures).data)}
            if part["type"] == "input_image"
            else part
            for part in self.shown["content"]
        ]
        return {**self.shown, "content": content}


class ItemReader:
    """Checks what a client brings and fetches its pictures, for one owner."""

    def __init__(self, service: Tokenizing, desk: MediaDesk, owner: str) -> None:
        self._service, self._desk, self._owner = service, desk, owner

    async def read(self, given: Any, where: str = "item") -> Item:
        """The item; InvalidRequest or MediaError names the part of it that is wrong, below ``where``."""
        fields = _checked(given, where)
        try:
            messages, seen = await self._messages(fields)
        except MMServeError as error:
            error.message = error.message.replace(_HERE, where).replace("output[0]", where)
            error.param = error.param and error.param.replace(_HERE, where).replace("output[0]", where)
            raise
        name = fields.get("id") or new_id()
        item = Item(id=name, shown=_shown(fields, name, seen), messages=messages)
        words = item.words
        short = len(words) <= COUNTED
        tokens = len(await asyncio.to_thread(self._service.tokenize, words)) if short else len(words) // 3
        return _weighed(item, tokens + sum(s.tokens for s in seen))

    async def _messages(self, fields: Fields) -> tuple[tuple[Message, ...], list[Seen]]:
        plain = messages_of([fields])
        if not plain:
            return (), []
        found = await self._desk.find(media_refs(plain), self._owner)
        messages = parse_messages(plain, lambda ref: found[ref.param])
        pictures = [p for m in messages for p in m.content if isinstance(p, ImagePart)]
        return messages, await together([self._service.look(part) for part in pictures])


class Conversation:
    """Items in their order, of at most ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self.id = f"conv_{uuid.uuid4().hex[:24]}"
        self._most_bytes = most_bytes
        self._items: dict[str, Item] = {}

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last_id(self) -> str | None:
        return next(reversed(self._items), None)

    def get(self, name: str, param: str = "item_id") -> Item:
        """NotFound where there is none of that id."""
        if name not in self._items:
            raise NotFound(f"there is no item {name[:100]!r} in this conversation", param=param)
        return self._items[name]

    def check(self, item: Item, after: str | None, may_drop: bool) -> None:
        """InvalidRequest if ``item`` cannot stand behind ``after`` or does not fit; others ``may_drop``."""
        if item.id in self._items:
            raise InvalidRequest(f"there is an item {item.id!r} already", param="item.id")
        if after is not None and after != "root":
            self.get(after, "previous_item_id")
        held = 0 if may_drop else sum(other.nbytes for other in self)
        if held + item.nbytes > self._most_bytes or (not may_drop and len(self) >= MOST_ITEMS):
            raise InvalidRequest(
                f"the conversation is full: it may have {MOST_ITEMS} items of {self._most_bytes >> 20} MiB",
                param="item",
                code="conversation_full",
            )

    def put(self, item: Item, after: str | None = None) -> str | None:
        """Put ``item`` behind ``after`` ("root": at the beginning, None: at the end); what is before it."""
        if after is None or after == self.last_id:
            previous = self.last_id
            self._items[item.id] = item
            return previous
        others = list(self._items.values())
        place = 0 if after == "root" else 1 + [i.id for i in others].index(after)
        others.insert(place, item)
        self._items = {i.id: i for i in others}
        return others[place - 1].id if place else None

    def replace(self, item: Item) -> None:
        """Let ``item`` stand where one of its id is, if there is one."""
        if item.id in self._items:
            self._items[item.id] = item

    def remove(self, name: str) -> bool:
        """Whether it was there."""
        return self._items.pop(name, None) is not None

    def too_much(self) -> list[Item]:
        """The oldest items that must go so that the rest fits."""
        items = list(self._items.values())
        left, count = sum(item.nbytes for item in items), len(items)
        gone: list[Item] = []
        for item in items:
            if left <= self._most_bytes and count <= MOST_ITEMS:
                break
            gone.append(item)
            left -= item.nbytes
            count -= 1
        return gone


def oldest(items: Sequence[Item], keep_tokens: float) -> list[Item]:
    """The oldest of ``items`` to leave out so that at most ``keep_tokens`` stay; at least one goes, and the
    last message of the user stays, with what stands behind it."""
    asked = max(
        (i for i, item in enumerate(items) if item.shown.get("role") == "user"), default=len(items) - 1
    )
    left = sum(item.tokens for item in items)
    gone: list[Item] = []
    for item in items[:asked]:
        if gone and left <= keep_tokens:
            break
        gone.append(item)
        left -= item.tokens
    return gone


def folded(items: Iterable[Item]) -> list[Message]:
    """The messages of ``items``: words and calls that the model said in a row are one turn."""
    messages: list[Message] = []
    for message in (m for item in items for m in item.messages):
        last = messages[-1] if messages else None
        calls = message.extra.get("tool_calls")
        if last is not None and calls and last.role == message.role == "assistant":
            extra = {**last.extra, "tool_calls": [*last.extra.get("tool_calls", ()), *calls]}
            messages[-1] = structs.replace(last, extra=extra)
        else:
            messages.append(message)
    return messages


def said(shown: Fields) -> Item:
    """What an answer has become, as it stands in the conversation from now on."""
    plain = messages_of([shown])
    item = Item(id=shown["id"], shown=shown, messages=parse_messages(plain, _nothing) if plain else ())
    return _weighed(item, len(item.words) // 3)


def _weighed(item: Item, tokens: int) -> Item:
    """``item`` with its sizes, where its words and pictures have ``tokens``."""
    calls = len(str([m.extra for m in item.messages if m.extra]))
    data = [p.data for m in item.messages for p in m.content if isinstance(p, ImagePart)]
    item.tokens = tokens + calls // 3 + TURN_TOKENS * len(item.messages)
    item.nbytes = len(item.words) + calls + sum(len(d or b"") for d in data) + 1024
    return item


def new_id() -> str:
    return f"item_{uuid.uuid4().hex[:24]}"


# ---------------------------------------------------------------- what a client brings


def _checked(given: Any, where: str) -> Fields:
    """The fields of an item of a kind that is known here."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise unsupported(f"{where}.type", f"{where}.type must be one of {', '.join(_KINDS)} here")
    name = given.get("id")
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= LONGEST_ID and name != "root"):
        raise InvalidRequest(
            f"{where}.id must be a string of 1 to {LONGEST_ID} characters", param=f"{where}.id"
        )
    if kind == "message":
        _check_message(given, where)
    return dict(given)


def _check_message(given: Mapping[str, Any], where: str) -> None:
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where}.content must be a list of parts", param=f"{where}.content")
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _PARTS[role]:
            param = f"{where}.content[{number}].type"
            allowed = " or ".join(_PARTS[role])
            raise unsupported(param, f"{param} must be {allowed} in a message of the {role} here")


def _shown(fields: Fields, name: str, seen: Sequence[Seen]) -> Fields:
    shown = {**fields, "id": name, "object": "realtime.item", "status": fields.get("status") or "completed"}
    if fields["type"] == "message":
        told = iter(seen)
        shown["content"] = [
            _without_data(part, next(told)) if part["type"] == "input_image" else dict(part)
            for part in fields["content"]
        ]
    return shown


def _without_data(part: Mapping[str, Any], seen: Seen) -> Fields:
    """A picture as events tell it: what was sent as data is not sent back, but what the model sees of it."""
    url = part.get("image_url")
    kept = {} if isinstance(url, str) and url[:5].lower() == "data:" else {"image_url": url}
    beside = {"format": seen.format, "size": seen.size, "tokens": seen.tokens}
    return {**{k: v for k, v in part.items() if k != "image_url"}, **kept, "mmserve": beside}


def _data_url(data: bytes | None) -> str:
    data = data or b""
    kind = "png" if data[:4] == b"\x89PNG" else "webp" if data[8:12] == b"WEBP" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _nothing(ref: MediaRef) -> Loaded:
    raise AssertionError("an answer has no media")
