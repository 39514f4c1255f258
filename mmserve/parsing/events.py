"""The pieces of an answer, in their order."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace


class Reasoning(Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class Content(Struct, frozen=True):
    """More of what it says to the reader."""

    text: str


class CallBegin(Struct, frozen=True):
    """A tool is called. ``index`` counts the calls of an answer from 0."""

    index: int
    name: str


class CallArguments(Struct, frozen=True):
    """More of the arguments; all of one call, joined, are the JSON text of an object."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
    """The call is whole and its arguments are valid."""

    index: int


class CallBroken(Struct, frozen=True):
    """What began as a call is none. All that was said of it follows as ``Content``."""

    index: int


Delta = Reasoning | Content | CallArguments
Event = Delta | CallBegin | CallEnd | CallBroken


def joined(events: Iterable[Event]) -> list[Event]:
    """``events`` with neighbouring pieces of the same kind made one."""
    whole: list[Event] = []
    texts: list[str] = []
    for event in events:
        if texts and _continues(whole[-1], event):
            texts.append(event.text)  # type: ignore[union-attr]
            continue
        _close(whole, texts)
        whole.append(event)
        texts = [event.text] if isinstance(event, Delta) else []
    _close(whole, texts)
    return whole


def _continues(last: Event, event: Event) -> bool:
    if isinstance(last, CallArguments) and isinstance(event, CallArguments):
        return last.index == event.index
    return type(last) is type(event) and isinstance(event, Reasoning | Content)


def _close(whole: list[Event], texts: list[str]) -> None:
    """Give the last of ``whole`` the text of all its pieces."""
    if len(texts) > 1:
        whole.append(replace(whole.pop(), text="".join(texts)))
