"""A limit on what a model thinks before it answers, and the form of an answer that comes after thoughts.

BEFORE ──open──▶ THINKING ──budget used──▶ CLOSING ──▶ AFTER
   │                 └────────── the model closes ──────▲
   └──────────────── any other token ───────────────────┘
"""

import copy
from collections.abc import Iterable
from enum import Enum

import numpy as np

from mmserve.core.thinking import Thinking
from mmserve.engine.grammar.base import BitRow, GrammarFault, Matcher
from mmserve.engine.grammar.steering import ANYTHING, Steering


def steered(thinking: Thinking | None, form: Matcher | None) -> Steering | None:
    """What keeps thoughts to their budget, and the answer after them to its ``form``; None if all is free."""
    if thinking is not None and (form is not None or thinking.budget is not None):
        return Steering(ThinkingMatcher(thinking, form))
    return None if form is None else Steering(form)


class State(Enum):
    BEFORE = "before"
    THINKING = "thinking"
    CLOSING = "closing"
    AFTER = "after"


class ThinkingMatcher:
    """``Matcher`` that leaves thoughts free up to their budget; ``form`` holds for the answer alone.

    An answer cannot end inside thoughts. The opening and the closing tag do not count as thought.
    """

    def __init__(self, thinking: Thinking, form: Matcher | None = None) -> None:
        self._thinking = thinking
        self._form = form
        self._thought = self._closed = 0  # tokens of each
        self._state = State.BEFORE
        if thinking.inside:
            self._think()

    @property
    def complete(self) -> bool:
        return self._state is State.AFTER and self._form is not None and self._form.complete

    @property
    def free(self) -> bool:
        return self._state is State.AFTER and self._form is None

    def copy(self) -> "ThinkingMatcher":
        twin = copy.copy(self)
        twin._form = None if self._form is None else self._form.copy()
        return twin

    def fill(self, row: BitRow) -> None:
        if self._state is State.CLOSING:
            row[:] = 0
            _set(row, self._thinking.closing[self._closed : self._closed + 1], True)
        elif self._state is State.THINKING:
            row[:] = ANYTHING
            _set(row, self._thinking.ends, False)
        else:
            self._fill_answer(row)

    def accept(self, token: int) -> None:
        if self._state is State.BEFORE and token == self._thinking.open_id:
            self._think()
        elif self._state is State.THINKING:
            self._accept_thought(token)
        elif self._state is State.CLOSING:
            self._accept_closing(token)
        else:
            self._state = State.AFTER
            if self._form is not None:
                self._form.accept(token)

    def _fill_answer(self, row: BitRow) -> None:
        if self._form is None:
            row[:] = ANYTHING
            return
        self._form.fill(row)
        if self._state is State.BEFORE:
            _set(row, (self._thinking.open_id,), True)

    def _think(self) -> None:
        self._state = State.CLOSING if self._thinking.budget == 0 else State.THINKING

    def _accept_thought(self, token: int) -> None:
        if token == self._thinking.close_id:
            self._state = State.AFTER
            return
        if token in self._thinking.ends:
            raise GrammarFault("the answer ended inside its thoughts")
        self._thought += 1
        if self._thought == self._thinking.budget:
            self._state = State.CLOSING

    def _accept_closing(self, token: int) -> None:
        if token != self._thinking.closing[self._closed]:
            raise GrammarFault("the thoughts were not closed")
        self._closed += 1
        if self._closed == len(self._thinking.closing):
            self._state = State.AFTER


def _set(row: BitRow, tokens: Iterable[int], allowed: bool) -> None:
    words = row.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
