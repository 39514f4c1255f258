"""Rotary positions: tables for the decoder (M-RoPE) and for the vision transformer (axial)."""

import torch

from mmserve.models.config import TextConfig
from mmserve.models.layers.base import Placement

RopeTable = tuple[torch.Tensor, torch.Tensor]


def frequencies(dim: int, theta: float) -> torch.Tensor:
    """``theta ** (-2j / dim)`` for j in [0, dim / 2), float32."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def mrope_axes(section: tuple[int, int, int], interleaved: bool, width: int) -> torch.Tensor:
    """Which position (0 time, 1 height, 2 width) drives each of ``width`` rotary frequencies.

    Contiguous: ``section[0]`` of time, then ``section[1]`` of height, then ``section[2]`` of width.
    Interleaved: frequency j belongs to axis j mod 3 while j < 3 * section[axis], otherwise to time.
    """
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(section))
    axes = torch.zeros(width, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


class MRope:
    """The decoder's rotary positions."""

    def __init__(self, config: TextConfig, place: Placement) -> None:
        width = config.head_dim // 2
        self.frequencies = frequencies(config.head_dim, config.rope_theta).to(place.device)
        self.axes = mrope_axes(config.mrope_section, config.mrope_interleaved, width).to(place.device)
        self.ops = place.ops

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> RopeTable:
        """The table of positions int64 [3, T]."""
        return self.ops.mrope(positions, self.frequencies, self.axes, dtype)
