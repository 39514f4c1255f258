"""What /v1/responses takes as input, as the messages of a chat, and where each stood."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mmserve.core.errors import InvalidRequest, MMServeError

_PLACE = re.compile(r"messages(?:\[(\d+)\])?")


class Dialogue:
    """The messages of a request: an earlier conversation, instructions and the new input, in the order of the
    prompt. ``places`` are what the caller calls each."""

    def __init__(self, earlier: Sequence[Mapping[str, Any]], instructions: str | None, given: Any) -> None:
        """InvalidRequest names the item of the input that is wrong."""
        new, places = _messages(given)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        self.messages = [*system, *earlier, *new]
        self.places = ["instructions"] * len(system) + ["previous_response_id"] * len(earlier) + places
        self.kept = [*earlier, *new]  # for the next turn, which has instructions of its own

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


def _messages(given: Any) -> tuple[list[Mapping[str, Any]], list[str]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text or a list of items, and not empty", param="input")
    places = [f"input[{i}]" for i in range(len(given))]
    return [_message(item, place) for item, place in zip(given, places, strict=True)], places


def _message(item: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidRequest(f"{place} must be an object", param=place)
    if item.get("type", "message") != "message":
        raise InvalidRequest(
            f"{place}.type must be message; other items are not supported by this server",
            param=f"{place}.type",
            code="unsupported_value",
        )
    content = item.get("content")
    if isinstance(content, list):
        content = [_plain(part) for part in content]
    return {"role": item.get("role"), "content": content}


def _plain(part: Any) -> Any:
    """A part of an earlier answer may be a refusal, which is a text like any other."""
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part
