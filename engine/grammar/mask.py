"""What grammars forbid, taken out of the logits of a whole batch."""

from collections.abc import Sequence

import numpy as np
import torch

from mmserve.engine.grammar.steering import Steering


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
