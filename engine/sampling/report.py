"""Log-probabilities as they are reported: the model's own, before anything is done to its logits."""

from collections.abc import Iterator

import torch

from mmserve.core.messages import TokenLogprob
from mmserve.engine.sampling.leaders import Ints, host, leaders

BLOCK_BYTES = 16 << 20  # of float32 logits at once


def reported(
    logits: torch.Tensor,
    rows: Ints,
    tokens: Ints,
    counts: Ints,
) -> Iterator[tuple[int, TokenLogprob]]:
    """(row, entry) for each of ``rows`` of ``logits`` [R, vocab], in which its token was chosen: with the
    ``counts`` most likely ones beside it."""
    most = max(BLOCK_BYTES // (4 * logits.shape[1]), 1)
    for i in range(0, len(rows), most):
        part = slice(i, i + most)
        taken = logits[torch.from_numpy(rows[part]).to(logits.device)]
        found = Ranked(taken, tokens[part], int(counts[part].max()))
        columns = zip(found.chosen.tolist(), found.ids.tolist(), found.values.tolist(), strict=True)
        for row, token, count, (chosen, ids, values) in zip(
            rows[part].tolist(), tokens[part].tolist(), counts[part].tolist(), columns, strict=True
        ):
            top = tuple(zip(ids, values, strict=True))[:count]
            yield row, TokenLogprob(token, chosen, top)


class Ranked:
    """Log-probabilities of rows of logits [S, vocab]: those of ``tokens`` (``chosen`` [S]), and of the
    ``count`` most likely (``values`` and ``ids`` [S, count]), on the host."""

    def __init__(self, logits: torch.Tensor, tokens: Ints, count: int) -> None:
        self._logits = logits.float()
        index = torch.from_numpy(tokens).to(logits.device)
        self._raw = self._logits.gather(1, index[:, None])
        total = host(self._logits.logsumexp(-1, keepdim=True))
        self.chosen = host(self._raw)[:, 0] - total[:, 0]
        values, self.ids = leaders(self._logits, count)
        self.values = values - total

    def ranks(self) -> Ints:
        """Places of ``tokens`` among all tokens, the most likely being 1: int64 [S]."""
        return host((self._logits > self._raw).sum(-1)) + 1
