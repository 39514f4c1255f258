"""Parsers that read text as it comes and may stop in the middle of anything."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from mmserve.parsing.events import Event

Steps = Iterator[Event | None]


class Incremental(ABC):
    """A parser written as one generator, ``_read``: it yields events, and None where it needs more text.

    ``_buffer`` is the text that was not taken yet. What is yielded must follow from the text alone, never
    from where it was cut. After None, either there is more in the buffer or ``_ended`` is set; a parser
    whose text has ended yields no None.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._ended = False
        self._steps = self._read()

    def feed(self, text: str) -> list[Event]:
        """The events that ``text``, the next piece, makes certain."""
        self._buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """The last events; nothing may be fed afterwards."""
        self._ended = True
        return self._advance()

    @abstractmethod
    def _read(self) -> Steps:
        """The parser as one generator over the text that has come."""

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _advance(self) -> list[Event]:
        events = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events


def held(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` with which ``tag`` may begin."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
