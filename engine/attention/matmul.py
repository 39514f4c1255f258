"""Attention by plain matrix products on views of the pool: the backend for CPUs.

bf16 SDPA is 2 to 3 times slower than these products on a CPU for prompts, and 20 times for decode; for
float32 they are level or better (measured at 16/8 heads of 128, context 300 to 2,000).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mmserve.engine.attention.base import Span
from mmserve.engine.kv.page_table import SlotRun
from mmserve.engine.kv.pool import KVPool

PAD = 64  # contexts are rounded up to this: oneDNN builds a kernel for each new shape, about 1 ms
QUERY_BLOCK = 128
RUNS = 8  # pieces of a context that are read where they lie; a product for each costs 5 to 10 us
SCORES = 128 * 1024  # scores of one head in a block of queries; larger blocks fall out of the cache


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of a context, in ``runs`` of slots: one run is read where it lies."""

    runs: list[SlotRun]
    start: int
    stop: int


class MatmulAttention:
    """Keys and values are read where they lie, as [kv_heads, context, d] views of the pool.

    Decodes: one product for the scores of each run of a request's pages, one softmax over all of them, one
    product a run for the result; a request that shares a prefix has two runs, and neither is copied. Only
    what lies in more than RUNS pieces is gathered. Prompts: blocks of queries, each against all it may
    see, with a mask on its diagonal square only.
    """

    capturable = False  # the host walks the plan: its views and lengths would be frozen into a graph
    captured_rows = 0
    form = "plain"

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.scale = pool.shape.head_dim**-0.5
        self.slots = pool.data.shape[3]
        self._blocks = PromptBlocks(pool)

    def plan(self, spans: Sequence[Span], num_rows: int) -> None:
        decodes = [s for s in spans if len(s) == 1]
        self._prompts = [(s, s.table.slot_runs(0, s.stop)) for s in spans if len(s) > 1]
        self._contexts = [self._pieces(s) for s in decodes]
        self._decode_rows = self._on_device(np.array([s.row for s in decodes], dtype=np.int64))
        new = [s.table.slots(s.start, s.stop) for s in decodes]
        self._decode_slots = self._on_device(np.concatenate(new) if new else np.empty(0, np.int64))
        lengths = [pieces[-1].stop for pieces in self._contexts]
        self._longest = max(lengths, default=0)
        self._masks = [self._length_mask(s.stop, n) for s, n in zip(decodes, lengths, strict=True)]
        self._buffer: torch.Tensor | None = None  # scores; beyond a request's own length they stay -inf
        covered = sum(len(s) for s in spans)
        self._dense = covered == num_rows and not self._prompts

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        if self._dense:
            return self._decode(q, k, v, layer)
        out = torch.zeros_like(q)
        if self._contexts:
            single = self._decode_rows
            out[single] = self._decode(q[single], k[single], v[single], layer)
        for span, runs in self._prompts:
            rows = slice(span.row, span.row + len(span))
            self._prompt(span, runs, q[rows], k[rows], v[rows], layer, out[rows])
        return out

    # ------------------------------------------------------------ one new token a request

    def _decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        keys.index_copy_(1, self._decode_slots, k.transpose(0, 1))
        values.index_copy_(1, self._decode_slots, v.transpose(0, 1))
        grouped = q.unflatten(1, (keys.shape[0], -1))  # [B, kv_heads, group, d]
        weights = self._scores(grouped, keys).softmax(-1).to(q.dtype)
        out = torch.empty_like(grouped)
        for i, pieces in enumerate(self._contexts):
            for piece in pieces:
                part = weights[i, :, :, piece.start : piece.stop]
                if piece.start == 0:
                    torch.bmm(part, _view(values, piece.runs), out=out[i])
                else:
                    torch.baddbmm(out[i], part, _view(values, piece.runs), out=out[i])
        return out.flatten(1, 2)

    def _scores(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Scaled and masked, float32 [B, kv_heads, group, longest]; the buffer of the plan, for one layer."""
        if self._buffer is None:
            self._buffer = torch.full((*q.shape[:3], self._longest), -torch.inf, device=q.device)
        for i, pieces in enumerate(self._contexts):
            for piece in pieces:
                # keys times queries: the other way round a CPU would repack the keys, at twice the time
                product = torch.bmm(_view(keys, piece.runs), q[i].transpose(1, 2)).transpose(1, 2)
                place = slice(piece.start, piece.stop)
                out = self._buffer[i, :, :, place]
                torch.add(self._masks[i][place], product, alpha=self.scale, out=out)
        return self._buffer

    def _pieces(self, span: Span) -> list[Piece]:
        """The slots of a context, its end rounded up where the pool does not end before."""
        runs = span.table.slot_runs(0, span.stop)
        start, stop = runs[-1]
        stop = min(stop + -span.stop % PAD, self.slots)
        runs[-1] = (start, stop)
        parts = [[run] for run in runs] if len(runs) <= RUNS else [runs]
        pieces, first = [], 0
        for part in parts:
            last = first + sum(b - a for a, b in part)
            pieces.append(Piece(part, first, last))
            first = last
        return pieces

    def _length_mask(self, stop: int, length: int) -> torch.Tensor:
        """0 within a context of ``stop`` tokens, -inf in its padding up to ``length``."""
        mask = torch.zeros(length, device=self.pool.data.device)
        mask[stop:] = -torch.inf
        return mask

    # ------------------------------------------------------------ many new tokens of one request

    def _prompt(
        self,
        span: Span,
        runs: list[SlotRun],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        first = 0
        for a, b in span.table.slot_runs(span.start, span.stop):
            rows = slice(first, first + b - a)
            keys[:, a:b], values[:, a:b] = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
            first = rows.stop
        self._blocks.attend(q, runs, layer, span.start, out)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.pool.data.device)


class PromptBlocks:
    """Causal attention of one request's new tokens, all of whose keys and values are in the pool."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.scale = pool.shape.head_dim**-0.5
        self._triangle = torch.full((QUERY_BLOCK, QUERY_BLOCK), -torch.inf, device=pool.data.device).triu(1)
        self._triangle = self._triangle.to(pool.shape.dtype)

    def attend(self, q: torch.Tensor, runs: list[SlotRun], layer: int, start: int, out: torch.Tensor) -> None:
        """q, out [T, heads, d] are tokens [start, start + T); ``runs`` tell the slots of all up to there."""
        keys, values = _view(self.pool.keys(layer), runs), _view(self.pool.values(layer), runs)
        kv_heads, context, dim = keys.shape
        grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, T, d]
        result = out.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        group = grouped.shape[1]
        size = max(16, min(QUERY_BLOCK, SCORES // (context * group)))
        for a in range(0, q.shape[0], size):
            rows = min(size, q.shape[0] - a)
            seen = start + a + rows
            block = grouped[:, :, a : a + rows].reshape(kv_heads, group * rows, dim)
            scores = torch.bmm(block, keys[:, :seen].transpose(1, 2)).mul_(self.scale)
            square = scores.view(kv_heads, group, rows, seen)[..., seen - rows :]
            square += self._triangle[:rows, :rows]
            mixed = torch.bmm(scores.softmax(-1), values[:, :seen])
            result[:, :, a : a + rows] = mixed.view(kv_heads, group, rows, dim)


def _view(slots: torch.Tensor, runs: list[SlotRun]) -> torch.Tensor:
    """[kv_heads, context, d]: a view when the context is one run, else a copy."""
    parts = [slots[:, a:b] for a, b in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
