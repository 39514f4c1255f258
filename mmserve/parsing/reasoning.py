"""Qwen's ``<think>...</think>``: what a model thinks before it answers, told apart from the answer.

    <think>\\n thoughts \\n</think>\\n\\n answer

The line breaks just inside the tags and after the closing one are layout: templates put them there and
take them away again, and so does the parser.
"""

from mmserve.core.thinking import CLOSE, OPEN, Start
from mmserve.parsing.events import Content, Reasoning
from mmserve.parsing.incremental import Incremental, Steps, held


class ReasoningParser(Incremental):
    """Tells thoughts (``Reasoning``) from the answer (``Content``).

    There is one block at most. It opens where nothing but white space stands before the tag on its line;
    a tag elsewhere, and any tag after the block, is text. A block that is never closed is all thought.
    """

    def __init__(self, start: Start = Start.UNDECIDED) -> None:
        super().__init__()
        self._start = start

    def _read(self) -> Steps:
        if self._start is Start.UNDECIDED:
            yield from self._before()
        if self._start is not Start.OUTSIDE:
            yield from self._repeated_tag()
            yield from self._thoughts()
            yield from self._skip_breaks()
        while True:
            if self._buffer:
                yield Content(self._take(len(self._buffer)))
            if self._ended:
                return
            yield None

    def _before(self) -> Steps:
        """Up to and with the tag that opens the block. White space alone before it is layout."""
        said, blank = False, True  # whether anything was given out, and whether its last line is empty
        while True:
            at = self._buffer.find(OPEN)
            if at >= 0 and _ends_blank(self._buffer[:at], blank):
                before = self._take(at + len(OPEN))[:at]
                if said or before.strip():
                    yield Content(before)
                return
            safe = at + len(OPEN) if at >= 0 else self._surely_content(said)
            if safe:
                said, blank = True, _ends_blank(self._buffer[:safe], blank)
                yield Content(self._take(safe))
            elif self._ended:
                return
            else:
                yield None

    def _surely_content(self, said: bool) -> int:
        """How much of a buffer without the tag is content, whatever comes next."""
        if self._ended:
            return len(self._buffer)
        safe = len(self._buffer) - held(self._buffer, OPEN)
        return safe if said or self._buffer[:safe].strip() else 0

    def _repeated_tag(self) -> Steps:
        """Some models open the block that the prompt has opened already."""
        yield from self._skip_breaks()
        while self._buffer != OPEN and OPEN.startswith(self._buffer) and not self._ended:
            yield None
        self._buffer = self._buffer.removeprefix(OPEN)

    def _thoughts(self) -> Steps:
        yield from self._skip_breaks()
        while True:
            at = self._buffer.find(CLOSE)
            if at >= 0:
                thought = self._take(at + len(CLOSE))[:at].rstrip("\n")
                if thought:
                    yield Reasoning(thought)
                return
            safe = self._surely_thought()
            if safe:
                yield Reasoning(self._take(safe))
            if self._ended:
                return
            yield None

    def _surely_thought(self) -> int:
        if self._ended:
            return len(self._buffer)
        return len(self._buffer[: len(self._buffer) - held(self._buffer, CLOSE)].rstrip("\n"))

    def _skip_breaks(self) -> Steps:
        self._buffer = self._buffer.lstrip("\n")
        while not self._buffer and not self._ended:
            yield None
            self._buffer = self._buffer.lstrip("\n")


def _ends_blank(text: str, blank: bool) -> bool:
    """Whether the last line has nothing but white space after ``text``; ``blank``: it had before."""
    _, line_break, line = text.rpartition("\n")
    return (blank or bool(line_break)) and not line.strip()
