"""What /v1/responses takes as input, as the messages of a chat, and where each stood."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mmserve.core.errors import InvalidRequest, MMServeError
from mmserve.parsing.calls import call_arguments
from mmserve.server.errors import unsupported

Message = dict[str, Any]
_PLACE = re.compile(r"messages(?:\[(\d+)\])?")


class Dialogue:
    """The messages of a request: an earlier conversation, instructions and the new input, in the order of the
    prompt. ``places`` are what the caller calls each."""

    def __init__(self, earlier: Sequence[Mapping[str, Any]], instructions: str | None, given: Any) -> None:
        """InvalidRequest names the item of the input that is wrong."""
        turns = _turns(given)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        self.messages = [*system, *earlier, *turns.messages]
        before = ["instructions"] * len(system) + ["previous_response_id"] * len(earlier)
        self.places = [*before, *turns.places]
        self.kept = [*earlier, *turns.messages]  # for the next turn, which has instructions of its own

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors about ``messages`` inside the block name what the caller wrote instead."""
        try:
            yield
        except MMServeError as error:
            error.message = _PLACE.sub(self._place, error.message)
            error.param = error.param and _PLACE.sub(self._place, error.param)
            raise

    def _place(self, found: re.Match[str]) -> str:
        return self.places[int(found[1])] if found[1] and int(found[1]) < len(self.places) else "input"


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The items of a response as the model's turn of a conversation."""
    return _Turns(items, "output").messages


def _turns(given: Any) -> "_Turns":
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
        turns = _Turns(given, "input")
        turns.places = ["input"]
        return turns
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text or a list of items, and not empty", param="input")
    return _Turns(given, "input")


class _Turns:
    """Items folded into messages: thoughts, words and calls that the model said in a row are one."""

    def __init__(self, items: Sequence[Any], where: str) -> None:
        self.messages: list[Message] = []
        self.places: list[str] = []
        for number, item in enumerate(items):
            self._add(item, f"{where}[{number}]")

    def _add(self, item: Any, place: str) -> None:
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{place} must be an object", param=place)
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _READERS:
            raise unsupported(
                f"{place}.type", f"{place}.type must be one of {', '.join(_READERS)} here; others are unknown"
            )
        message = _READERS[kind](item, place)
        if message is None:
            return
        if not self._joined(message, place):
            self.messages.append(message)
            self.places.append(place)

    def _joined(self, message: Message, place: str) -> bool:
        """Whether the message before, which is of the same turn, took it in."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or message["role"] != "assistant":
            return False
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            return True
        thoughts_alone = not last["content"] and "tool_calls" not in last and "reasoning_content" in last
        if thoughts_alone and "reasoning_content" not in message:
            last["content"], self.places[-1] = message["content"], place
            return True
        return False


def _message(item: Mapping[str, Any], place: str) -> Message:
    content = item.get("content")
    if isinstance(content, list):
        content = [_plain(part) for part in content]
    return {"role": item.get("role"), "content": content}


def _plain(part: Any) -> Any:
    """A part of an earlier answer may be a refusal, which is a text like any other."""
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _reasoning(item: Mapping[str, Any], place: str) -> Message | None:
    """Thoughts, or their summary; none of either says nothing to this model."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise InvalidRequest(f"{place}.content must be a list of parts", param=f"{place}.content")
    text = "".join(str(part.get("text", "")) for part in parts)
    return {"role": "assistant", "content": "", "reasoning_content": text} if text else None


def _call(item: Mapping[str, Any], place: str) -> Message | None:
    """A call; one that broke in an earlier answer is none: its text stands beside it as a message."""
    if item.get("status") == "incomplete":
        return None
    function = {
        "name": _text(item, "name", place),
        "arguments": call_arguments(item.get("arguments"), f"{place}.arguments"),
    }
    call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(item: Mapping[str, Any], place: str) -> Message:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise InvalidRequest(f"{place}.output must be a text or a list of parts", param=f"{place}.output")
    return {"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": output}


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{place}.{name} must be a string", param=f"{place}.{name}")
    return value


_READERS: dict[str, Callable[[Mapping[str, Any], str], Message | None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _result,
}


# ---------------------------------------------------------------- listed


def listed(given: Any, response_id: str) -> list[dict[str, Any]]:
    """The items of an ``input`` as they are shown: with ids, which stay the same, and contents in parts."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_shown(item, f"{response_id.removeprefix('resp_')}_{i}") for i, item in enumerate(items)]


def _shown(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    shown = {"status": "completed", **item, "type": kind, "id": item.get("id") or f"{_PREFIXES[kind]}_{name}"}
    if kind == "message" and isinstance(item.get("content"), str):
        text = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            text = {**text, "type": "output_text", "annotations": []}
        shown["content"] = [text]
    return shown


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
