"""What grammars forbid, taken out of the logits of a whole batch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mmserve.engine.grammar.steering import Steering


def steer(
    logits: torch.Tensor,
    steerings: Sequence[Steering | None],
    rows: npt.NDArray[np.int64] | None = None,
) -> None:
    """Set what may not come next to -inf in ``rows`` of ``logits`` [R, vocab] (all of them if not given), one
    steering each; where it is None, anything may come."""
    rows = np.arange(len(logits)) if rows is None else rows
    vocab = logits.shape[1]
    bits = np.full((len(rows), -(-vocab // 32)), -1, np.int32)
    for steering, row in zip(steerings, bits, strict=True):
        if steering is not None:
            steering.allow(row)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
    forbidden = torch.from_numpy(allowed).to(logits.device) == 0
    index = torch.from_numpy(rows).to(logits.device)
    logits[index] = logits[index].masked_fill(forbidden, -torch.inf)
