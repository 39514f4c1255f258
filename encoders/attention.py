"""Attention over the segments of one packed batch: every row sees the rows of its own segment, both ways."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import nn

from mmserve.models.config import VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.layers.linear import Linear
from mmserve.models.layers.rope import RopeTable

QUERY_BLOCK = 256
SCORE_BLOCK = 1 << 21  # scores computed at once: 4 MiB in bf16


@dataclass(frozen=True)
class Run:
    """``count`` neighbouring segments of ``length`` rows each, from row ``start`` on."""

    start: int
    length: int
    count: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length * self.count)


def runs(lengths: Iterable[int]) -> tuple[Run, ...]:
    """The segments of a packed batch, neighbours of equal length together."""
    found, start = [], 0
    for length, group in groupby(lengths):
        count = sum(1 for _ in group)
        found.append(Run(start, length, count))
        start += length * count
    return tuple(found)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: tuple[Run, ...]) -> torch.Tensor:
    """softmax(q k^T / sqrt(dim)) v within each segment; all [T, heads, dim], result [T, heads * dim]."""
    kernel = _blocked if q.device.type == "cpu" and q.dtype == torch.bfloat16 else _fused
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for run in segments:
        shape = (run.count, run.length, *q.shape[1:])
        kernel(*(x[run.rows].view(shape).transpose(1, 2) for x in (q, k, v, out)))
    return out.view(q.shape[0], -1)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(F.scaled_dot_product_attention(q, k, v))


def _blocked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Batched products over blocks of heads and queries whose scores stay in the cache.

    In bf16 on a CPU about twice as fast as the fused form. Scores are scaled before they are rounded;
    softmax computes in float32 inside.
    """
    length, dim = q.shape[2:]
    queries, keys, values = (x.reshape(-1, length, dim) for x in (q, k, v))
    keys = keys.transpose(1, 2)
    mixed = torch.empty_like(queries)
    rows = min(length, QUERY_BLOCK)
    heads = max(1, SCORE_BLOCK // (rows * length))
    for first in range(0, len(queries), heads):
        some = slice(first, first + heads)
        for start in range(0, length, rows):
            block = queries[some, start : start + rows]
            scores = block.new_empty(*block.shape[:2], length)
            torch.baddbmm(scores, block, keys[some], beta=0, alpha=dim**-0.5, out=scores)
            mixed[some, start : start + rows] = torch.bmm(torch.softmax(scores, -1), values[some])
    out.copy_(mixed.view(q.shape))


class VisionAttention(nn.Module):
    """Projections, rotary positions over both axes, attention within segments."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        width = config.hidden_size
        self.qkv = Linear(width, 3 * width, place, bias=True)
        self.proj = Linear(width, width, place, bias=True)
        self.shape = (3 * config.num_heads, config.head_dim)
        self.heads = config.num_heads
        self.ops = place.ops

    def forward(self, x: torch.Tensor, rope: RopeTable, segments: tuple[Run, ...]) -> torch.Tensor:
        qkv = self.qkv(x).view(-1, *self.shape)
        self.ops.rotate_heads(qkv, 2 * self.heads, None, 0.0, *rope)
        return self.proj(attend(*qkv.chunk(3, 1), segments))
