"""What the three vision transformers share: patches in, one packed batch through the blocks, items out."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from mmserve.encoders.graphs import EncoderGraphs
from mmserve.encoders.grids import Grid, GridConstants, axial_rope, joined
from mmserve.encoders.packed import Packed
from mmserve.encoders.parts import Parts, Resumable
from mmserve.encoders.patch_embed import PatchEmbed
from mmserve.encoders.segments import Run, runs
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
        self.graphs: EncoderGraphs | None = None  # of ``deep``, where a device captures it

    def parts(self, pixels: list[torch.Tensor], grids: list[Grid]) -> Parts[list[torch.Tensor]]:
        """See ``models.forward.VisionEncoder``."""
        packed = yield from self.embed(pixels, grids)
        features = None if self.graphs is None else (yield from self.graphs.run(packed))
        if features is None:
            features = yield from self.deep(packed)
        return self.unpack(features, grids)

    @abstractmethod
    def embed(self, pixels: list[torch.Tensor], grids: list[Grid]) -> Parts[Packed]:
        """All that depends on the grids: the patches of all items as rows."""

    @abstractmethod
    def deep(self, packed: Packed) -> Parts[torch.Tensor]:
        """The blocks and mergers: features [tokens, 1 + D, hidden of the decoder] in the order of the rows,
        of which ``packed.x`` is used up."""

    def unpack(self, features: torch.Tensor, grids: list[Grid]) -> list[torch.Tensor]:
        """Of rows in the order of ``embed``, one tensor an item."""
        return self.split(features, grids)

    def forward(self, pixels: list[torch.Tensor], grids: list[Grid]) -> list[torch.Tensor]:
        """See ``models.forward.VisionEncoder``."""
        return Resumable(self.parts(pixels, grids)).finish()

    def rope_table(self, coordinates: torch.Tensor) -> RopeTable:
        cos, sin = axial_rope(coordinates, self.config.head_dim, self.config.rope_theta)
        return cos.to(self.place.device), sin.to(self.place.device)

    def rope(self, constants: Sequence[GridConstants]) -> RopeTable:
        return joined([c.cos for c in constants]), joined([c.sin for c in constants])

    def room(self, x: torch.Tensor) -> torch.Tensor:
        """Where the features of patches ``x`` will stand: [tokens, 1 + D, hidden of the decoder]."""
        tokens = x.shape[0] // self.config.merge_size**2
        return x.new_empty(tokens, 1 + len(self.config.deepstack_layers), self.config.out_hidden_size)

    def split(self, features: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """The packed result [sum of tokens, 1 + D, hidden] as one tensor an item."""
        return list(features.split([h * w // self.config.merge_size**2 for h, w in grids]))


def item_segments(grids: Sequence[Grid]) -> tuple[Run, ...]:
    """Full attention: one segment an item, since an item is one temporal patch."""
    return runs(h * w for h, w in grids)
