"""Patch embedding straight from uint8 pixels: no float picture exists.

The checkpoint's own form is a convolution over normalised values of two frames,

    y = b + sum_f W_f . (p_f / 255 - mean) / std        f = 0, 1

With W'_f = W_f / (255 std) and pixels centred by 128, which bf16 and float32 hold exactly,

    y = b' + sum_f W'_f . (p_f - 128)        b' = b + sum_f W_f . (128 / 255 - mean) / std

A still stands twice in its own temporal patch (p_0 = p_1), so W'_0 + W'_1 is applied once to it.
"""

from collections.abc import Iterator, Sequence

import torch

from mmserve.encoders.parts import Parts, Resumable, row_parts
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Layer, Placement

CENTRE = 128


def fold(
    weight: torch.Tensor, bias: torch.Tensor | None, normalization: Normalization
) -> tuple[torch.Tensor, torch.Tensor]:
    """(W' [out, 2, patch, patch, channel], b' [out]), float64, of weight [out, channel, 2, patch, patch]."""
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (normalization.mean, normalization.std))
    wide = weight.double().permute(0, 2, 3, 4, 1)
    offset = (wide * ((CENTRE / 255 - mean) / std)).sum((1, 2, 3, 4))
    return wide / (255 * std), offset if bias is None else offset + bias.double()


def patch_rows(pixels: torch.Tensor, grid: tuple[int, int], patch: int, merge: int) -> torch.Tensor:
    """uint8 [frames, H, W, C] -> [h * w, frames * patch * patch * C], patches in merge-block order.

    Merge-block order is (h / merge, w / merge, merge, merge): the patches of one merged token are
    neighbours. ValueError when the pixels do not have the size that the grid says.
    """
    h, w = grid
    frames, height, width, channels = pixels.shape
    if (height, width) != (h * patch, w * patch) or h % merge or w % merge:
        raise ValueError(f"pixels {width}x{height} do not fit a grid of {w}x{h} patches of {patch}")
    blocks = pixels.view(frames, h // merge, merge, patch, w // merge, merge, patch * channels)
    return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(h * w, frames * patch * patch * channels)


class PatchEmbed(Layer):
    """Stills and frame pairs of any sizes -> one row a patch."""

    def __init__(
        self, config: VisionConfig, normalization: Normalization, place: Placement, *, bias: bool
    ) -> None:
        super().__init__()
        shape = (config.hidden_size, config.in_channels, 2, config.patch_size, config.patch_size)
        self.weight = place.empty(*shape, dtype=torch.float32)
        self.bias = place.empty(config.hidden_size, dtype=torch.float32) if bias else None
        self.normalization = normalization
        self.patch, self.merge = config.patch_size, config.merge_size
        self.place = place
        self.packed: dict[int, torch.Tensor] = {}

    def slots(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, view in super().slots(path):
            yield name.replace(f"{path}.", f"{path}.proj."), view

    def prepare(self) -> None:
        weight, bias = fold(
            self.weight.cpu(), None if self.bias is None else self.bias.cpu(), self.normalization
        )
        forms = {1: weight.sum(1).flatten(1), 2: weight.flatten(1)}
        self.packed = {frames: self.place.ops.linear.pack(self._placed(w)) for frames, w in forms.items()}
        self.offset = self._placed(bias)
        del self.weight, self.bias

    def forward(self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """``parts``, all of them."""
        return Resumable(self.parts(pixels, grids)).finish()

    def parts(self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> Parts[torch.Tensor]:
        """uint8 [frames, H, W, 3] each, frames 1 or 2 -> [sum of h * w, hidden], item after item."""
        frames = {p.shape[0] for p in pixels}
        if not frames <= self.packed.keys():
            raise ValueError(f"a vision item has 1 or 2 frames, not {max(frames)}")
        if len(frames) == 1:
            return (yield from self._embed(pixels, grids))
        parts: dict[int, torch.Tensor] = {}
        for count in sorted(frames):
            chosen = [i for i, p in enumerate(pixels) if p.shape[0] == count]
            sizes = [grids[i][0] * grids[i][1] for i in chosen]
            embedded = yield from self._embed([pixels[i] for i in chosen], [grids[i] for i in chosen])
            parts.update(zip(chosen, embedded.split(sizes), strict=True))
        return torch.cat([parts[i] for i in range(len(pixels))])

    def _embed(self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> Parts[torch.Tensor]:
        """Items with the same number of frames."""
        if self.place.ops.embed_patches is not None:
            return (yield from self._embed_uncut(pixels, grids))
        cut = [patch_rows(p, g, self.patch, self.merge) for p, g in zip(pixels, grids, strict=True)]
        raw = (cut[0] if len(cut) == 1 else torch.cat(cut)).to(self.place.device)
        out = torch.empty(raw.shape[0], *self.offset.shape, dtype=self.place.dtype, device=raw.device)
        for rows in row_parts(raw):
            values = raw[rows].to(self.place.dtype).sub_(CENTRE)
            out[rows] = self.place.ops.linear(values, self.packed[pixels[0].shape[0]], self.offset)
            yield 2.0 * values.numel() * out.shape[1]
        return out

    def _embed_uncut(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> Parts[torch.Tensor]:
        """As ``_embed``, by a kernel that reads each item's pixels as they are: a part is an item."""
        embed, weight = self.place.ops.embed_patches, self.packed[pixels[0].shape[0]]
        assert embed is not None
        sizes = [h * w for h, w in grids]
        out = self.offset.new_empty(sum(sizes), *self.offset.shape)
        for item, grid, rows in zip(pixels, grids, out.split(sizes), strict=True):
            embed(item.to(self.place.device), grid, self.merge, weight, self.offset, rows)
            yield 2.0 * weight.numel() * rows.shape[0]
        return out

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.place.device, self.place.dtype).contiguous()
