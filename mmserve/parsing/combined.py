"""A whole answer: thoughts, then words and calls of tools."""

from collections.abc import Iterable, Mapping

from mmserve.core.thinking import Start
from mmserve.parsing.argument_types import Schema
from mmserve.parsing.events import CallEnd, Content, Event
from mmserve.parsing.reasoning import ReasoningParser
from mmserve.parsing.tools import ToolParser


class AnswerParser:
    """Turns the text of an answer, however it is cut, into events.

    ``start`` is where the answer begins, by the prompt (``Start.of``). ``tools`` are the parameters' schemas
    by the names of the tools that the model may call; None where it may call none, and tags of calls are
    words like any other.
    """

    def __init__(self, start: Start, tools: Mapping[str, Schema] | None = None) -> None:
        self.calls = 0  # whole ones
        self._reasoning = ReasoningParser(start)
        self._tools = None if tools is None else ToolParser(tools)

    def feed(self, text: str) -> list[Event]:
        """The events that ``text``, the next piece, makes certain."""
        return self._counted(self._told(self._reasoning.feed(text)))

    def finish(self) -> list[Event]:
        """The last events. A call that was cut off in the middle is none: its text is content."""
        last = self._told(self._reasoning.finish())
        return self._counted([*last, *(self._tools.finish() if self._tools else ())])

    def _told(self, events: Iterable[Event]) -> list[Event]:
        if self._tools is None:
            return list(events)
        told: list[Event] = []
        for event in events:
            told += self._tools.feed(event.text) if isinstance(event, Content) else (event,)
        return told

    def _counted(self, events: list[Event]) -> list[Event]:
        self.calls += sum(isinstance(event, CallEnd) for event in events)
        return events
