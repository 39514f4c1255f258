"""The vision transformer of Qwen2-VL."""

import torch
from torch import nn

from mmserve.encoders.blocks import Merger, VisionBlock
from mmserve.encoders.grids import Grid, GridCache, GridConstants, coordinates
from mmserve.encoders.packed import Packed
from mmserve.encoders.parts import Parts
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

    def embed(self, pixels: list[torch.Tensor], grids: list[Grid]) -> Parts[Packed]:
        x = yield from self.patch_embed.parts(pixels, grids)
        return Packed(x, self.rope([self.constants(g) for g in grids]), item_segments(grids))

    def deep(self, packed: Packed) -> Parts[torch.Tensor]:
        x = packed.x
        for block in self.blocks:
            yield from block(x, packed.rope, packed.whole)
        features = self.room(x)
        yield from self.merger(x, features[:, 0])
        return features

    def _constants(self, grid: Grid) -> GridConstants:
        return GridConstants(*self.rope_table(coordinates(grid, self.config.merge_size)))
