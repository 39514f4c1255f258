"""A scheduled batch as flat arrays: request after request, numpy first and one copy to the device."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from mmserve.engine.attention.base import Span
from mmserve.engine.features import FeatureClaims
from mmserve.engine.scheduler.request import Batch, Chunk, Request
from mmserve.models.forward import VisionRows

Feed = Callable[[torch.Tensor], None]  # sets token ids that stand on the device already, before a forward

Place = Callable[[npt.NDArray[np.int64]], torch.Tensor]  # puts an array on the device

PROMPT_ROWS = 8  # small steps with prompts are padded to a multiple of it, and
LARGE_ROWS = 16  # those of more than SMALL rows to a multiple of this
SMALL = 64


class FlatBatch:
    """``token_ids`` int64 [T], ``positions`` int64 [3, T], ``logit_rows`` int64 [R], attention spans.

    ``decodes_only``: there are no prompts, and no padding.

    Steps with prompts are padded by rows that are in no span, since each number of rows is a shape of its
    own to every linear layer: on a CPU oneDNN builds a kernel for it, 1 ms and 0.6 MiB each.
    """

    def __init__(self, batch: Batch) -> None:
        self.decodes_only = not batch.prompts
        self.num_rows = batch.num_tokens if self.decodes_only else padded(batch.num_tokens)
        self.token_ids = np.zeros(self.num_rows, dtype=np.int64)
        self.positions = np.zeros((3, self.num_rows), dtype=np.int64)
        self.spans: list[Span] = []
        self._decodes(batch.decodes)
        for chunk in batch.prompts:
            self._prompt(chunk)
        self.logit_rows = self._logit_rows(batch)

    def _decodes(self, requests: list[Request]) -> None:
        """Generated token g of a prompt of N stands at N + g + position_delta on all axes."""
        rows, starts = range(len(requests)), [r.computed_len for r in requests]
        stops, tables = [r.num_tokens for r in requests], [r.table for r in requests]
        self.token_ids[: len(rows)] = [r.newest for r in requests]
        self.positions[:, : len(rows)] = starts
        self.positions[:, : len(rows)] += np.array([r.prepared.position_delta for r in requests], np.int64)
        self.spans += map(Span, rows, starts, stops, tables)

    def _logit_rows(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Every decode's row, and the last row of every prompt that ends in this step; behind them the rows
        that prompts want for their own log-probabilities."""
        spans = list(zip(self.spans[len(batch.decodes) :], batch.prompts, strict=True))
        ends = [span.row + len(span) - 1 for span, chunk in spans if chunk.samples]
        own = [np.asarray(chunk.wanted) + (span.row - chunk.start) for span, chunk in spans if chunk.wanted]
        return np.concatenate((np.arange(len(batch.decodes)), ends, *own)).astype(np.int64)

    def _prompt(self, chunk: Chunk) -> None:
        row = self.spans[-1].row + len(self.spans[-1]) if self.spans else 0
        rows = slice(row, row + len(chunk))
        self.token_ids[rows] = chunk.request.token_ids[chunk.start : chunk.stop]
        _positions(chunk, self.positions[:, rows])
        self.spans.append(Span(row, chunk.start, chunk.stop, chunk.request.table))


def padded(rows: int) -> int:
    """Rows of a step with prompts that has ``rows`` to compute."""
    step = PROMPT_ROWS if rows <= SMALL else LARGE_ROWS
    return -(-rows // step) * step


def vision_rows(batch: Batch, spans: list[Span], claims: FeatureClaims, place: Place) -> VisionRows | None:
    """Features of the items, or parts of items, that are computed in this step; decodes have none to come."""
    rows: list[npt.NDArray[np.int64]] = []
    features: list[torch.Tensor] = []
    for chunk, span in zip(batch.prompts, spans[len(batch.decodes) :], strict=True):
        request = chunk.request
        for index in range(request.items_passed, request.items_held):
            first, last = request.items[index].span
            start, stop = max(first, chunk.start), min(last, chunk.stop)
            if start < stop:
                rows.append(np.arange(start, stop) + (span.row - chunk.start))
                features.append(claims.features(request, index)[start - first : stop - first])
    if not rows:
        return None
    flat = place(np.concatenate(rows))
    return VisionRows(flat, features[0] if len(features) == 1 else torch.cat(features))


def _positions(chunk: Chunk, out: npt.NDArray[np.int64]) -> None:
    """Of the prompt as prepared, and of the answer so far when a preempted request starts again."""
    prepared, prompt_len = chunk.request.prepared, chunk.request.prompt_len
    known = max(min(chunk.stop, prompt_len) - chunk.start, 0)
    out[:, :known] = prepared.positions[:, chunk.start : chunk.start + known]
    out[:, known:] = np.arange(chunk.start + known, chunk.stop) + prepared.position_delta
