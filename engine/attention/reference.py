"""The oracle: gather, mask, softmax, all in float32. Every other backend is tested against it."""

from collections.abc import Sequence

import torch

from mmserve.engine.attention.base import Span
from mmserve.engine.kv.pool import KVPool


class ReferenceAttention:
    """softmax(q k^T / sqrt(d) + causal mask) v, request by request, as the formula reads."""

    capturable = False
    captured_rows = 0
    form = "plain"

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.spans: Sequence[Span] = ()

    def plan(self, spans: Sequence[Span], num_rows: int) -> None:
        self.spans = spans

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        out = torch.zeros_like(q)
        for span in self.spans:
            rows = slice(span.row, span.row + len(span))
            out[rows] = self._attend(span, q[rows], k[rows], v[rows], layer)
        return out

    def _attend(
        self, span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        slots = torch.from_numpy(span.table.slots(0, span.stop)).to(q.device)
        keys[:, slots[span.start :]] = k.transpose(0, 1)
        values[:, slots[span.start :]] = v.transpose(0, 1)
        group = q.shape[1] // keys.shape[0]
        past_k = keys[:, slots].float().repeat_interleave(group, 0)  # [heads, stop, d]
        past_v = values[:, slots].float().repeat_interleave(group, 0)
        scores = q.transpose(0, 1).float() @ past_k.transpose(1, 2) * q.shape[2] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(span.start)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ past_v).transpose(0, 1).to(q.dtype)
