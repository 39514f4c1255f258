"""The vision transformer of Qwen3-VL: learned positions and deepstack features."""

from dataclasses import dataclass

import torch
from torch import nn

from mmserve.encoders.blocks import Merger, PositionTable, VisionBlock
from mmserve.encoders.grids import Grid, GridCache, GridConstants, bilinear, coordinates, joined
from mmserve.encoders.packed import Packed
from mmserve.encoders.parts import Parts
from mmserve.encoders.transformer import VisionTransformer, item_segments
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.layers.mlp import MLP
from mmserve.models.layers.norm import LayerNorm


@dataclass(frozen=True)
class PositionedGrid(GridConstants):
    """``positions`` [n, hidden]: the learned positions between whose table entries each patch lies."""

    positions: torch.Tensor


class Qwen3Vision(VisionTransformer):
    def __init__(self, config: VisionConfig, normalization: Normalization, place: Placement) -> None:
        super().__init__(config, normalization, place, patch_bias=True)
        assert config.num_position_embeddings is not None
        width, hidden = config.hidden_size, config.intermediate_size
        self.pos_embed = PositionTable(config.num_position_embeddings, width, place)
        self.blocks = nn.ModuleList(
            VisionBlock(config, LayerNorm, MLP(width, hidden, width, config.hidden_act, place), place)
            for _ in range(config.depth)
        )
        self.merger = Merger(config, LayerNorm, place)
        self.constants = GridCache(self._constants)
        self.deepstack = nn.ModuleList(
            Merger(config, LayerNorm, place, wide_norm=True) for _ in config.deepstack_layers
        )

    def embed(self, pixels: list[torch.Tensor], grids: list[Grid]) -> Parts[Packed]:
        constants = [self.constants(g) for g in grids]
        x = yield from self.patch_embed.parts(pixels, grids)
        x.add_(joined([c.positions for c in constants]))
        return Packed(x, self.rope(constants), item_segments(grids))

    def deep(self, packed: Packed) -> Parts[torch.Tensor]:
        """Feature 1 + d is that of the d-th deepstack layer."""
        x = packed.x
        features = self.room(x)
        for i, block in enumerate(self.blocks):
            yield from block(x, packed.rope, packed.whole)
            if i in self.config.deepstack_layers:
                d = self.config.deepstack_layers.index(i)
                yield from self.deepstack[d](x, features[:, 1 + d])
        yield from self.merger(x, features[:, 0])
        return features

    def _constants(self, grid: Grid) -> PositionedGrid:
        cos, sin = self.rope_table(coordinates(grid, self.config.merge_size))
        positions = self.pos_embed(*bilinear(grid, self.config.merge_size, self.pos_embed.side))
        return PositionedGrid(cos, sin, positions)
