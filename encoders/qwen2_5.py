"""The vision transformer of Qwen2.5-VL: most blocks attend within windows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mmserve.encoders.blocks import Merger, VisionBlock
from mmserve.encoders.grids import Grid, GridCache, GridConstants, coordinates, joined, windows
from mmserve.encoders.packed import Packed
from mmserve.encoders.parts import Parts
from mmserve.encoders.segments import runs
from mmserve.encoders.transformer import VisionTransformer, item_segments
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.layers.mlp import GatedMLP
from mmserve.models.layers.norm import RMSNorm


@dataclass(frozen=True)
class WindowedGrid(GridConstants):
    """``order`` int64 [n / merge^2]: which merged token stands where when those of a window are neighbours.
    ``inverse`` undoes it. ``windows``: their lengths in rows. The rotary tables are in that order."""

    order: torch.Tensor
    inverse: torch.Tensor
    windows: tuple[int, ...]


class Qwen25Vision(VisionTransformer):
    """Merged tokens are reordered so that a window's rows are neighbours, and put back after the merger."""

    def __init__(self, config: VisionConfig, normalization: Normalization, place: Placement) -> None:
        super().__init__(config, normalization, place, patch_bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(
                config,
                RMSNorm,
                GatedMLP(config.hidden_size, config.intermediate_size, place, bias=True),
                place,
            )
            for _ in range(config.depth)
        )
        self.merger = Merger(config, RMSNorm, place)
        self.constants = GridCache(self._constants)

    def embed(self, pixels: list[torch.Tensor], grids: list[Grid]) -> Parts[Packed]:
        constants = [self.constants(g) for g in grids]
        local = runs(n for c in constants for n in c.windows)
        x = yield from self.patch_embed.parts(pixels, grids)
        x = x.view(-1, self.config.merge_size**2 * x.shape[1])[_packed([c.order for c in constants])]
        x = x.view(-1, self.config.hidden_size)
        return Packed(x, self.rope(constants), item_segments(grids), local)

    def deep(self, packed: Packed) -> Parts[torch.Tensor]:
        x = packed.x
        assert packed.local is not None
        for i, block in enumerate(self.blocks):
            segments = packed.whole if i in self.config.full_attention_layers else packed.local
            yield from block(x, packed.rope, segments)
        features = self.room(x)
        yield from self.merger(x, features[:, 0])
        return features

    def unpack(self, features: torch.Tensor, grids: list[Grid]) -> list[torch.Tensor]:
        inverse = _packed([self.constants(g).inverse for g in grids])
        return self.split(features[inverse], grids)

    def _constants(self, grid: Grid) -> WindowedGrid:
        config = self.config
        assert config.window_size is not None
        side = config.window_size // config.merge_size // config.patch_size
        order, lengths = windows(grid, config.merge_size, side)
        places = coordinates(grid, config.merge_size).view(len(order), -1, 2)
        cos, sin = self.rope_table(places[order].view(-1, 2))
        order = order.to(self.place.device)
        return WindowedGrid(cos, sin, order, order.argsort(), lengths)


def _packed(orders: Sequence[torch.Tensor]) -> torch.Tensor:
    """Orders within items -> one order over the packed batch."""
    starts, parts = 0, []
    for order in orders:
        parts.append(order + starts if starts else order)
        starts += len(order)
    return joined(parts)
