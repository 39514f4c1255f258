"""What the three vision transformers share: patches in, one packed batch through the blocks, items out."""

from collections.abc import Sequence

import torch
from torch import nn

from mmserve.encoders.attention import Run, runs
from mmserve.encoders.grids import Grid, GridConstants, axial_rope, joined
from mmserve.encoders.patch_embed import PatchEmbed
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.layers.rope import RopeTable


class VisionTransformer(nn.Module):
    """Base of the families, each a ``models.forward.VisionEncoder``."""

    def __init__(
        self, config: VisionConfig, normalization: Normalization, place: Placement, *, patch_bias: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.place = place
        self.patch_embed = PatchEmbed(config, normalization, place, bias=patch_bias)

    def rope_table(self, coordinates: torch.Tensor) -> RopeTable:
        cos, sin = axial_rope(coordinates, self.config.head_dim, self.config.rope_theta)
        return cos.to(self.place.device), sin.to(self.place.device)

    def rope(self, constants: Sequence[GridConstants]) -> RopeTable:
        return joined([c.cos for c in constants]), joined([c.sin for c in constants])

    def split(self, features: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """The packed result [sum of tokens, 1 + D, hidden] as one tensor an item."""
        return list(features.split([h * w // self.config.merge_size**2 for h, w in grids]))


def item_segments(grids: Sequence[Grid]) -> tuple[Run, ...]:
    """Full attention: one segment an item, since an item is one temporal patch."""
    return runs(h * w for h, w in grids)
