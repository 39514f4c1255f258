"""An answer's events in the words of /v1/chat/completions: deltas of a stream, and the whole message."""

import uuid
from collections.abc import Sequence
from typing import Any

from mmserve.parsing.events import CallArguments, CallBegin, CallBroken, Content, Event, Reasoning

Delta = dict[str, Any]


class Spoken:
    """One choice in the making: events in, deltas out, and in the end the message and why it ended."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        self._calls: dict[int, dict[str, Any]] = {}

    def take(self, events: Sequence[Event]) -> list[Delta]:
        """The deltas of what comes next."""
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def message(self) -> dict[str, Any]:
        """As an answer without a stream has it. A call that broke is content, and no call."""
        said = {name: "".join(pieces) for name, pieces in self._texts.items()}
        body: dict[str, Any] = {"role": "assistant", "content": said["content"], "refusal": None}
        if said["reasoning_content"]:
            body["reasoning_content"] = said["reasoning_content"]
        if self._calls:
            body["content"] = said["content"] or None
            body["tool_calls"] = list(self._calls.values())
        return body

    def finish_reason(self, reason: str | None) -> str | None:
        """Why it ended, where the engine's reason is ``reason``."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _delta(self, event: Event) -> Delta | None:
        if isinstance(event, Reasoning | Content):
            name = "content" if isinstance(event, Content) else "reasoning_content"
            self._texts[name].append(event.text)
            return {name: event.text}
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"id": new_call_id(), "type": "function", "function": function}
            self._calls[event.index] = call
            return {"tool_calls": [{"index": event.index, **call, "function": dict(function)}]}
        if isinstance(event, CallArguments):
            self._calls[event.index]["function"]["arguments"] += event.text
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        if isinstance(event, CallBroken):
            del self._calls[event.index]
        return None


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
