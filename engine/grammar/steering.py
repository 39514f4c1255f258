"""Keeping one request to its grammar. Without torch, since requests carry it through the scheduler."""

import numpy as np

from mmserve.engine.grammar.base import BitRow, GrammarFault, Matcher

ANYTHING = np.int32(-1)


class Steering:
    """One request's matcher. What goes wrong with it is told by ``fault`` and ends this request alone."""

    def __init__(self, matcher: Matcher) -> None:
        self.fault: str | None = None
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether only the end may come now."""
        return self._matcher.complete

    @property
    def free(self) -> bool:
        """Whether it has nothing to say any more."""
        return self.fault is None and self._matcher.free

    def allow(self, row: BitRow) -> None:
        """Set the bits of the tokens that may come next; all of them where nothing can be said any more,
        since the request ends before its token is used."""
        try:
            self._matcher.fill(row)
        except GrammarFault as fault:
            self.fault = str(fault)
            row[:] = ANYTHING

    def accept(self, token: int) -> None:
        if self.fault is None:
            try:
                self._matcher.accept(token)
            except GrammarFault as fault:
                self.fault = str(fault)
