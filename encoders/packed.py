"""A batch of pictures behind its patch embedding: what the blocks are given."""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from mmserve.encoders.segments import Run, Tiles
from mmserve.models.layers.rope import RopeTable

Segments: TypeAlias = tuple[Run, ...] | Tiles


@dataclass(frozen=True)
class Packed:
    """``x`` [n, hidden], patches of all items; their rotary table, [n, 1, head_dim] each; which rows see each
    other in blocks of full attention (``whole``), and in the others, where a family has such (``local``)."""

    x: torch.Tensor
    rope: RopeTable
    whole: Segments
    local: Segments | None = None
