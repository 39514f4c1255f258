"""The items of a response in the making, and the events that tell of them in a stream."""

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from mmserve.parsing.events import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from mmserve.server.spoken import new_call_id

Item = dict[str, Any]
Tell = Callable[..., bytes]  # (kind of event, **fields)


class Events:
    """Writes numbered events."""

    def __init__(self) -> None:
        self.count = 0

    def tell(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self.count, **fields}
        self.count += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))


def untold(kind: str, **fields: Any) -> bytes:
    """For a response that is no stream."""
    return b""


class Output:
    """``items``: thoughts, messages and calls in the order in which they were said. The last one may be open.

    A call that broke stays, as incomplete: what was said of it follows as a message.
    """

    def __init__(self, tell: Tell) -> None:
        self.items: list[Item] = []
        self._tell = tell
        self._open = False
        self._texts: list[str] = []  # of the open item

    def take(self, event: Event) -> bytes:
        """The events that tell of what comes next."""
        if isinstance(event, Reasoning | Content):
            return self._text("message" if isinstance(event, Content) else "reasoning", event.text)
        if isinstance(event, CallBegin):
            return self.close() + self._begin(_call(event.name))
        if isinstance(event, CallArguments):
            self._texts.append(event.text)
            return self._told("response.function_call_arguments.delta", delta=event.text)
        assert isinstance(event, CallEnd | CallBroken)
        return self.close("completed" if isinstance(event, CallEnd) else "incomplete")

    def finish(self, status: str) -> bytes:
        """The end of the last item, which may be cut off; an answer of nothing is an empty message."""
        begun = b"" if self.items else self._text("message", "")
        return begun + self.close(status)

    def close(self, status: str = "completed") -> bytes:
        """The end of the open item, if there is one."""
        if not self._open:
            return b""
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        self._open = False
        self._texts = []
        if item["type"] == "function_call":
            item["arguments"] = text
            done = self._told("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            item["content"] = [_part(item["type"], text)]
            done = self._of_part(f"{_TEXT[item['type']]}.done", text=text)
            done += self._of_part("response.content_part.done", part=item["content"][0])
        return done + self._of_item("response.output_item.done")

    def _text(self, kind: str, text: str) -> bytes:
        begun = b""
        if not self._open or self.items[-1]["type"] != kind:
            begun = self.close() + self._begin(_EMPTY[kind]())
            begun += self._of_part("response.content_part.added", part=_part(kind, ""))
        if not text:
            return begun
        self._texts.append(text)
        return begun + self._of_part(f"{_TEXT[kind]}.delta", delta=text)

    def _begin(self, item: Item) -> bytes:
        self.items.append(item)
        self._open = True
        return self._of_item("response.output_item.added")

    def _of_item(self, kind: str) -> bytes:
        return self._tell(kind, output_index=len(self.items) - 1, item=self.items[-1])

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        if kind.startswith("response.output_text"):
            fields["logprobs"] = []
        return self._told(kind, content_index=0, **fields)

    def _told(self, kind: str, **fields: Any) -> bytes:
        item_id = self.items[-1]["id"]
        return self._tell(kind, item_id=item_id, output_index=len(self.items) - 1, **fields)


_TEXT = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _part(kind: str, text: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message() -> Item:
    return {**_item("msg", "message"), "role": "assistant", "content": []}


def _reasoning() -> Item:
    return {**_item("rs", "reasoning"), "summary": [], "content": []}


def _call(name: str) -> Item:
    return {**_item("fc", "function_call"), "call_id": new_call_id(), "name": name, "arguments": ""}


def _item(prefix: str, kind: str) -> Item:
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}


_EMPTY: dict[str, Callable[[], Item]] = {"message": _message, "reasoning": _reasoning}
