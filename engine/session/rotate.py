"""Stored keys moved to other positions."""

import torch

from mmserve.models.config import TextConfig
from mmserve.models.layers.rope import frequencies
from mmserve.models.ops.reference import rope, rope_table


def moved_back(keys: torch.Tensor, shift: int, config: TextConfig) -> torch.Tensor:
    """Keys [kv_heads, T, head_dim], rotated by their positions, as they are at positions lower by ``shift``.

    A key is stored as R(p) k, and rotations add up: R(p - shift) k = R(-shift) R(p) k (RoFormer,
    arXiv:2104.09864). On three axes that move alike it does not matter which of them drives a frequency, so
    this is the same for every layout of M-RoPE. Angles are in float64, because float32 knows one of 30,000
    radians to 2e-3 only; the rotation is in float32, the result in the keys' dtype.
    """
    turns = frequencies(config.head_dim, config.rope_theta).double() * -shift
    cos, sin = rope_table(turns[None], torch.float32)
    return rope(keys, cos.to(keys.device), sin.to(keys.device))
