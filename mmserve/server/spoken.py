"""An answer's events in the words of /v1/chat/completions: deltas of a stream, and the whole message."""

import uuid
from collections.abc import Mapping
from typing import Any

from mmserve.core.errors import InvalidRequest
from mmserve.parsing.combined import AnswerParser
from mmserve.parsing.events import CallArguments, CallBegin, CallBroken, Content, Event, Reasoning
from mmserve.parsing.json_object import strict

Delta = dict[str, Any]


class Spoken:
    """One choice in the making: text in, deltas out, and in the end the message and why it ended."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._texts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, text: str) -> list[Delta]:
        """The deltas that the next piece of text makes certain."""
        return self._taken(self._parser.feed(text))

    def end(self) -> list[Delta]:
        """The last deltas; the message is whole."""
        return self._taken(self._parser.finish())

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
        return "tool_calls" if reason == "stop" and self._parser.calls else reason

    def _taken(self, events: list[Event]) -> list[Delta]:
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> Delta | None:
        if isinstance(event, Reasoning | Content):
            name = "content" if isinstance(event, Content) else "reasoning_content"
            self._texts[name].append(event.text)
            return {name: event.text}
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            self._calls[event.index] = call
            return {"tool_calls": [{"index": event.index, **call, "function": dict(function)}]}
        if isinstance(event, CallArguments):
            self._calls[event.index]["function"]["arguments"] += event.text
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        if isinstance(event, CallBroken):
            del self._calls[event.index]
        return None


def template_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The ``tool_calls`` of an earlier answer as templates take them: arguments as values, not as their text.

    InvalidRequest names the call that is wrong.
    """
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list of calls", param=where)
    return [_template_call(call, f"{where}[{i}].function") for i, call in enumerate(calls)]


def _template_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = strict(arguments)
        except ValueError as error:
            raise InvalidRequest(
                f"{where}.arguments is not JSON: {error}", param=f"{where}.arguments"
            ) from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}.arguments must be an object", param=f"{where}.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
