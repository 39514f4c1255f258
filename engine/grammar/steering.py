"""Keeping each row of a batch to its own grammar."""

from collections.abc import Sequence

import numpy as np
import torch

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


def steer(logits: torch.Tensor, steerings: Sequence[Steering | None]) -> None:
    """Set what may not come next to -inf in ``logits`` [R, vocab], one steering a row or None."""
    rows = [i for i, steering in enumerate(steerings) if steering is not None]
    if not rows:
        return
    vocab = logits.shape[1]
    bits = np.empty((len(rows), -(-vocab // 32)), np.int32)
    for steering, row in zip((s for s in steerings if s is not None), bits, strict=True):
        steering.allow(row)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
    forbidden = torch.from_numpy(allowed).to(logits.device) == 0
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
