"""From logits of prompts to their log-probabilities."""

from collections.abc import Sequence

import torch

from mmserve.engine.sampling.report import BLOCK_BYTES, Ranked
from mmserve.engine.scheduler.request import Chunk


def score_prompts(logits: torch.Tensor, chunks: Sequence[Chunk]) -> None:
    """Tell the prompts of ``chunks`` the log-probabilities in ``logits`` [rows, vocab]: the rows that each
    wants, one chunk after the other. In blocks, so that little is held in float32."""
    most = max(BLOCK_BYTES // (4 * logits.shape[1]), 1)
    end = 0
    for chunk in chunks:
        scores, rows = chunk.request.scores, chunk.wanted
        start, end = end, end + len(rows)
        for i in range(start, end, most):
            assert scores is not None
            part = logits[i : min(i + most, end)]
            tokens = scores.tokens[scores.known + 1 : scores.known + 1 + len(part)]
            found = Ranked(part, tokens.astype("int64"), scores.count)
            scores.add(found.chosen, found.ranks(), found.ids, found.values)
    assert end == len(logits), "logits that no prompt asked for"
