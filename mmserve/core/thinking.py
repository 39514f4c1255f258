"""Qwen's ``<think>...</think>``: where an answer begins, how its thoughts are told, how long they may be."""

import re
from enum import Enum

from msgspec import Struct

OPEN, CLOSE = "<think>", "</think>"
CLOSING = f"\n{CLOSE}\n\n"  # what is said for a model whose budget is used
_OPENED = re.compile(f"{OPEN}\\s*$")


class Start(Enum):
    """Where the answer begins, which the end of the prompt decides."""

    UNDECIDED = "undecided"  # the model thinks if it opens the tag itself
    INSIDE = "inside"  # the prompt has opened the tag
    OUTSIDE = "outside"  # there will be no thoughts: a later tag is a word like any other

    @classmethod
    def of(cls, prompt: str, thinks: bool) -> "Start":
        """The start after ``prompt`` or its last words; ``thinks`` is whether the template knows the tag."""
        if _OPENED.search(prompt):
            return cls.INSIDE
        closed = prompt.rstrip().endswith(CLOSE)
        return cls.UNDECIDED if thinks and not closed else cls.OUTSIDE


class Thinking(Struct, frozen=True):
    """How a model thinks, as token ids.

    ``open_id`` and ``close_id`` are the tags, ``closing`` what is said for the model when ``budget`` tokens
    were thought (line breaks, say, and the closing tag among them), ``ends`` the tokens that end an answer.
    ``inside`` is whether the prompt has opened the tag. ``budget`` None is no limit.
    """

    open_id: int
    close_id: int
    closing: tuple[int, ...]
    ends: tuple[int, ...] = ()
    inside: bool = False
    budget: int | None = None


class ThoughtCount:
    """How many tokens of an answer are thoughts, the tags not among them."""

    def __init__(self, thinking: Thinking | None) -> None:
        self.tokens = 0
        self._thinking = thinking  # None: no more to come
        self._inside = thinking is not None and thinking.inside

    def add(self, token: int) -> None:
        """Take the next token of the answer."""
        thinking = self._thinking
        if thinking is None:
            return
        if token == thinking.close_id:
            self._thinking = None if self._inside else thinking
        elif token == thinking.open_id:
            self._inside = True
        elif self._inside and self.tokens != thinking.budget:  # then it is what closes them
            self.tokens += 1
