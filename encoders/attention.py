"""Attention over the segments of one packed batch: every row sees the rows of its own segment, both ways."""

import logging
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mmserve.encoders.parts import Parts
from mmserve.encoders.segments import Run, Tiles, tiles_for
from mmserve.models.config import VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.layers.linear import Linear
from mmserve.models.layers.rope import RopeTable
from mmserve.models.ops import flashinfer
from mmserve.models.ops.native import attention as native
from mmserve.models.ops.triton import runtime as triton

log = logging.getLogger(__name__)

QUERY_BLOCK = 256
SCORE_BLOCK = 1 << 21  # scores computed at once: 4 MiB in bf16, some 5 ms of arithmetic
SOFTMAX_WORK = 64.0  # what the softmax of one score takes, in operations of a matrix product

# q [segments, heads, rows, dim], k and v [segments, heads, length, dim] -> as q
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: tuple[Run, ...] | Tiles
) -> Parts[torch.Tensor]:
    """softmax(q k^T / sqrt(dim)) v within each segment, in parts; all [T, heads, dim], result
    [T, heads * dim]. Rows in no segment are zero."""
    if isinstance(segments, Tiles):
        return _in_tiles(q, k, v, segments)
    form, _ = choose_form(q.device, q.dtype, q.shape[2])
    if form in ("flashinfer", "triton"):
        mixed = (
            _ragged(q, k, v, segments) if form == "flashinfer" else _in_tiles(q, k, v, tiles_for(segments, q))
        )
        yield 4.0 * q.shape[1] * q.shape[2] * sum(run.count * run.length**2 for run in segments)
        return mixed
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for run in segments:
        if form == "native":
            yield from _native(run, q, k, v, out)
        else:
            shape = (run.count, run.length, *q.shape[1:])
            parts = (x[run.rows].view(shape).transpose(1, 2) for x in (q, k, v, out))
            yield from _blocks(_products if form == "products" else _fused, *parts)
    return out.flatten(1)


@cache
def choose_form(device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> tuple[str, str]:
    """(flashinfer, triton, native, products or fused, why): how ``attend`` runs on ``device``."""
    form, why = _on_cpu(dtype) if device.type == "cpu" else _on_gpu(device, dtype, head_dim)
    log.info("attention of pictures runs as %s: %s", form, why)
    return form, why


def _on_cpu(dtype: torch.dtype) -> tuple[str, str]:
    reason = native.unusable(torch.device("cpu"), dtype) or native.left_to_torch(dtype)
    if reason is None:
        return "native", "kernels in C++ sum in float32 at its full rate"
    if dtype == torch.bfloat16:
        return "products", f"torch's matrix products, not kernels in C++: {reason}"
    return "fused", f"torch's own attention, not kernels in C++: {reason}"


def _on_gpu(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    lacking = flashinfer.unusable(device, dtype, head_dim)
    if lacking is None:
        return "flashinfer", "one call for all pictures of a batch, by kernels made for this GPU"
    reason = triton.unusable(device)
    if reason is None:
        return "triton", f"one kernel for all pictures of a batch; flashinfer cannot run: {lacking}"
    return "fused", f"torch's own attention; flashinfer cannot run: {lacking}; triton cannot run: {reason}"


@cache
def _ragged_on(device: torch.device) -> flashinfer.RaggedAttention:
    return flashinfer.RaggedAttention(device)


def _ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: tuple[Run, ...]) -> torch.Tensor:
    """By FlashInfer, which wants every row to be in a segment."""
    rows = segments[-1].rows.stop if segments else 0
    lengths = tuple(run.length for run in segments for _ in range(run.count))
    if rows == len(q):
        return _ragged_on(q.device)(q, k, v, lengths).flatten(1)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if rows:
        out[:rows] = _ragged_on(q.device)(q[:rows], k[:rows], v[:rows], lengths)
    return out.flatten(1)


def _in_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    from mmserve.models.ops.triton import varlen_attention

    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    varlen_attention.attend(q, k, v, tiles.table, tiles.rows, out)
    return out.flatten(1)


def _native(run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Parts[None]:
    """As ``_blocks``, by kernels that read rows where they lie."""
    heads, dim = q.shape[1:]
    rows = min(run.length, QUERY_BLOCK)
    for segments, some in _groups(run.count, heads, max(1, SCORE_BLOCK // (rows * run.length))):
        starts = run.start + run.length * np.arange(run.count)[segments]
        queries, keys, values, mixed = (x[:, some] for x in (q, k, v, out))
        for row in range(0, run.length, rows):
            count = min(rows, run.length - row)
            native.attend_segments(queries, keys, values, mixed, starts + row, count, starts, run.length)
            yield len(starts) * queries.shape[1] * count * run.length * (4 * dim + SOFTMAX_WORK)


def _blocks(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> Parts[None]:
    """``kernel`` over blocks of segments, heads and queries; all [segments, heads, length, dim].

    On a CPU the scores of a block stay in the cache; elsewhere all is one block.
    """
    count, heads, length, dim = q.shape
    on_cpu = q.device.type == "cpu"
    rows = min(length, QUERY_BLOCK) if on_cpu else length
    together = max(1, SCORE_BLOCK // (rows * length)) if on_cpu else count * heads
    for some in _groups(count, heads, together):
        keys, values = (x[some].contiguous() if on_cpu else x[some] for x in (k, v))
        for start in range(0, length, rows):
            block = q[some][:, :, start : start + rows]
            out[some][:, :, start : start + rows] = kernel(block, keys, values)
            yield block[..., 0].numel() * length * (4 * dim + SOFTMAX_WORK)


def _groups(count: int, heads: int, together: int) -> Iterator[tuple[slice, slice]]:
    """All pairs of segment and head, about ``together`` at once: several segments, or some of one's heads."""
    segments = max(1, together // heads)
    for first in range(0, count, segments):
        for head in range(0, heads, together):
            yield slice(first, first + segments), slice(head, head + together)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Batched products: in bf16 on a CPU about twice as fast as the fused form. Scores are scaled before
    they are rounded; softmax computes in float32 inside."""
    queries, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    scores = queries.new_empty(*queries.shape[:2], keys.shape[1])
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=q.shape[3] ** -0.5, out=scores)
    return torch.bmm(torch.softmax(scores, -1), values).view(q.shape)


class VisionAttention(nn.Module):
    """The two projections and rotary positions over both axes; ``attend`` lies between them."""

    def __init__(self, config: VisionConfig, place: Placement) -> None:
        super().__init__()
        width = config.hidden_size
        self.qkv = Linear(width, 3 * width, place, bias=True)
        self.proj = Linear(width, width, place, bias=True)
        self.shape = (3 * config.num_heads, config.head_dim)
        self.heads = config.num_heads
        self.ops = place.ops

    def project(self, x: torch.Tensor, rope: RopeTable) -> torch.Tensor:
        """Queries, keys and values of rows x [n, width], rotated: [n, 3 * heads, dim]."""
        qkv = self.qkv(x).view(-1, *self.shape)
        self.ops.rotate_heads(qkv, 2 * self.heads, None, 0.0, *rope)
        return qkv
