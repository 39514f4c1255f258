"""The vision transformer of Qwen2-VL."""

import torch
from torch import nn

from mmserve.encoders.blocks import Merger, VisionBlock
from mmserve.encoders.grids import Grid, GridCache, GridConstants, coordinates
from mmserve.encoders.transformer import VisionTransformer, item_segments
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.layers.mlp import MLP
from mmserve.models.layers.norm import LayerNorm


class Qwen2Vision(VisionTransformer):
    """Full attention, LayerNorm, two-layer feed-forward."""

    def __init__(self, config: VisionConfig, normalization: Normalization, place: Placement) -> None:
        super().__init__(config, normalization, place, patch_bias=False)
        width, hidden = config.hidden_size, config.intermediate_size
        self.blocks = nn.ModuleList(
            VisionBlock(config, LayerNorm, MLP(width, hidden, width, config.hidden_act, place), place)
            for _ in range(config.depth)
        )
        self.merger = Merger(config, LayerNorm, place)
        self.constants = GridCache(self._constants)

    def forward(self, pixels: list[torch.Tensor], grids: list[Grid]) -> list[torch.Tensor]:
        """See ``models.forward.VisionEncoder``."""
        rope = self.rope([self.constants(g) for g in grids])
        segments = item_segments(grids)
        x = self.patch_embed(pixels, grids)
        for block in self.blocks:
            x = block(x, rope, segments)
        return self.split(self.merger(x)[:, None], grids)

    def _constants(self, grid: Grid) -> GridConstants:
        return GridConstants(*self.rope_table(coordinates(grid, self.config.merge_size)))
