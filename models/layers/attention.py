"""The decoder's attention block; the attention itself is an argument (``models.forward.Attention``)."""

import torch
from torch import nn

from mmserve.models.config import TextConfig
from mmserve.models.forward import Attention, storing
from mmserve.models.layers.base import Placement
from mmserve.models.layers.linear import Linear, MergedLinear
from mmserve.models.layers.norm import HeadNorm
from mmserve.models.layers.rope import RopeTable


class DecoderAttention(nn.Module):
    """Projections, optional norm of the heads, rotary positions.

    What the projection wrote is rotated where it lies; attention reads queries, keys and values from there.
    For one that lets others store, keys and values are put into the pool in the same pass.
    """

    def __init__(self, config: TextConfig, layer: int, place: Placement) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv = MergedLinear(config.hidden_size, parts, place, bias=config.qkv_bias)
        self.o_proj = Linear(heads * dim, config.hidden_size, place, bias=config.output_bias)
        self.qk_norm = HeadNorm(heads, kv_heads, dim, place) if config.qk_norm else None
        self.eps = config.rms_norm_eps
        self.layer = layer
        self.split = (heads, kv_heads, kv_heads)
        self.shape = (heads + 2 * kv_heads, dim)
        self.ops = place.ops

    def forward(
        self, x: torch.Tensor, rope: RopeTable, attention: Attention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, hidden] -> the same, or only its ``rows`` int64 [R]: [R, hidden]."""
        qkv = self.qkv(x).view(-1, *self.shape)
        norm = None if self.qk_norm is None else self.qk_norm.weight
        if (stored := storing(attention)) is not None:
            keys, values, slots = stored.kv_slots(self.layer)
            self.ops.rotate_store(qkv, self.split, norm, self.eps, rope, (keys, values), slots)
            out = stored.attend(qkv[:, : self.split[0]], self.layer)
        else:
            self.ops.rotate_heads(qkv, self.split[0] + self.split[1], norm, self.eps, *rope)
            q, k, v = qkv.split(self.split, 1)
            out = attention.forward(q, k, v, self.layer)
        out = out.flatten(1)
        return self.o_proj(out if rows is None else out.index_select(0, rows))
