"""Blocks and mergers of the vision transformers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from mmserve.encoders.attention import VisionAttention, attend
from mmserve.encoders.packed import Segments
from mmserve.encoders.parts import ROWS, Parts, row_parts, row_work
from mmserve.models.config import VisionConfig
from mmserve.models.layers.base import Layer, Placement
from mmserve.models.layers.linear import Linear
from mmserve.models.layers.norm import LayerNorm, RMSNorm
from mmserve.models.layers.rope import RopeTable

EPS = 1e-6
Norm = Callable[[int, float, Placement], LayerNorm | RMSNorm]


class VisionBlock(nn.Module):
    """Pre-norm attention and feed-forward, in parts: only attention looks beyond a row."""

    def __init__(self, config: VisionConfig, norm: Norm, mlp: nn.Module, place: Placement) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size, EPS, place)
        self.norm2 = norm(config.hidden_size, EPS, place)
        self.attn = VisionAttention(config, place)
        self.mlp = mlp
        self.before, self.after = row_work(self.attn.qkv), row_work(self.attn.proj, mlp)

    def forward(self, x: torch.Tensor, rope: RopeTable, segments: Segments) -> Parts[None]:
        """``x`` becomes the block's output."""
        cos, sin = rope
        qkv = x.new_empty(x.shape[0], *self.attn.shape)
        for rows in row_parts(x):
            qkv[rows] = self.attn.project(self.norm1(x[rows]), (cos[rows], sin[rows]))
            yield self.before * x[rows].shape[0]
        q, k, v = qkv.chunk(3, 1)
        mixed = yield from attend(q, k, v, segments)
        for rows in row_parts(x):
            part = x[rows].add_(self.attn.proj(mixed[rows]))
            part.add_(self.mlp(self.norm2(part)))
            yield self.after * part.shape[0]


class Merger(nn.Module):
    """``merge^2`` neighbouring patches -> one token of the decoder's width, in parts.

    ``wide_norm``: the norm spans the joined patches (Qwen3-VL's deepstack) instead of each alone.
    """

    def __init__(
        self, config: VisionConfig, norm: Norm, place: Placement, *, wide_norm: bool = False
    ) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.norm = norm(self.width if wide_norm else config.hidden_size, EPS, place)
        self.fc1 = Linear(self.width, self.width, place, bias=True)
        self.fc2 = Linear(self.width, config.out_hidden_size, place, bias=True)
        self.wide_norm = wide_norm
        self.patches = config.merge_size**2
        self.work = row_work(self.fc1, self.fc2)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> Parts[None]:
        """``out`` [tokens, width of the decoder] becomes the tokens of the patches ``x``."""
        joined = x.view(-1, self.width)
        for rows in row_parts(joined, 2 * ROWS // self.patches):
            part = joined[rows]
            out[rows] = self.tokens(part)
            yield self.work * part.shape[0]

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Of patches, those of a token joined: [tokens, merge^2 * width]."""
        x = self.norm(x) if self.wide_norm else self.norm(x.unflatten(-1, (self.patches, -1))).flatten(1)
        return self.fc2(self.fc1(x, "gelu"))


class PositionTable(Layer):
    """Learned positions on a square grid, read between its points."""

    def __init__(self, count: int, width: int, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(count, width)
        self.side = int(count**0.5)

    def forward(self, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of entries ``indices`` [n, 4] with ``weights`` [n, 4], in the table's dtype."""
        rows = F.embedding(indices.to(self.weight.device), self.weight)
        return (rows * weights.to(self.weight.device)[:, :, None]).sum(1).to(self.weight.dtype)
