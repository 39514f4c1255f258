"""The decoder's attention block; the attention itself is an argument (``models.forward.Attention``)."""

import torch
from torch import nn

from mmserve.models.config import TextConfig
from mmserve.models.forward import Attention
from mmserve.models.layers.base import Placement
from mmserve.models.layers.linear import Linear, MergedLinear
from mmserve.models.layers.norm import HeadNorm
from mmserve.models.layers.rope import RopeTable


class DecoderAttention(nn.Module):
    """Projections, optional norm of the heads, rotary positions. Query and key heads move as one tensor."""

    def __init__(self, config: TextConfig, layer: int, place: Placement) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv = MergedLinear(config.hidden_size, parts, place, bias=config.qkv_bias)
        self.o_proj = Linear(heads * dim, config.hidden_size, place, bias=config.output_bias)
        self.qk_norm = HeadNorm(heads, kv_heads, dim, config.rms_norm_eps, place) if config.qk_norm else None
        self.layer = layer
        self.split = (heads, kv_heads)
        self.shape = (heads + 2 * kv_heads, dim)
        self.ops = place.ops

    def forward(self, x: torch.Tensor, rope: RopeTable, attention: Attention) -> torch.Tensor:
        heads, kv_heads = self.split
        qkv = self.qkv(x).view(-1, *self.shape)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = self.ops.rope(qk, *rope)
        out = attention.forward(qk[:, :heads], qk[:, heads:], v, self.layer)
        return self.o_proj(out.reshape(x.shape[0], -1))
