"""What depends only on a picture's grid: patch coordinates, rotary tables, windows; cached per grid."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from mmserve.models.layers.rope import RopeTable, frequencies
from mmserve.models.ops.reference import rope_table

Grid = tuple[int, int]


@dataclass(frozen=True)
class GridConstants:
    """For one grid of n = h * w patches: ``cos, sin`` float32 [n, 1, head_dim]. Families add their own."""

    cos: torch.Tensor
    sin: torch.Tensor


Constants = TypeVar("Constants", bound=GridConstants)


class GridCache(Generic[Constants]):
    """Constants by grid, the least recently used dropped beyond ``max_rows`` patches in all."""

    def __init__(self, build: Callable[[Grid], Constants], max_rows: int = 1 << 16) -> None:
        self.build = build
        self.max_rows = max_rows
        self.rows = 0
        self._entries: OrderedDict[Grid, Constants] = OrderedDict()

    def __call__(self, grid: Grid) -> Constants:
        found = self._entries.pop(grid, None)
        if found is None:
            found = self.build(grid)
            self.rows += grid[0] * grid[1]
        self._entries[grid] = found
        while self.rows > self.max_rows:
            (h, w), _ = self._entries.popitem(last=False)
            self.rows -= h * w
        return found


def coordinates(grid: Grid, merge: int) -> torch.Tensor:
    """int64 [h * w, 2]: (row, column) of each patch in merge-block order."""
    h, w = grid
    rows = torch.arange(h)[:, None].expand(h, w)
    columns = torch.arange(w)[None, :].expand(h, w)
    both = torch.stack([rows, columns], -1)
    return both.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


def axial_rope(coordinates: torch.Tensor, head_dim: int, theta: float) -> RopeTable:
    """Rotary table of patches: a quarter of head_dim turns with the row, a quarter with the column, twice."""
    angles = coordinates[:, :, None].float() * frequencies(head_dim // 2, theta)
    return rope_table(angles.flatten(1), torch.float32)


def windows(grid: Grid, merge: int, side: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """(order of the merged tokens, window lengths in patches): windows of ``side`` x ``side`` merged tokens.

    Windows at the right and lower edge are smaller where the grid is no multiple of ``side``. They
    are independent of each other, so those of equal size are put side by side, to be computed at once.
    """
    h, w = grid[0] // merge, grid[1] // merge
    tokens = torch.arange(h * w).view(h, w)
    parts = [
        tokens[top : top + side, left : left + side].flatten()
        for top in range(0, h, side)
        for left in range(0, w, side)
    ]
    parts.sort(key=len, reverse=True)
    return torch.cat(parts), tuple(len(part) * merge**2 for part in parts)


def bilinear(grid: Grid, merge: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices int64 [n, 4], weights float32 [n, 4]) into a table of ``side`` x ``side`` learned positions.

    The corners of the picture lie on the corners of the table.
    """
    taps, weights = zip(*(_axis(size, side) for size in grid), strict=True)
    row, column = coordinates(grid, merge).unbind(1)
    indices = taps[0][row][:, :, None] * side + taps[1][column][:, None, :]
    products = weights[0][row][:, :, None] * weights[1][column][:, None, :]
    return indices.flatten(1), products.flatten(1)


def _axis(size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Along one axis: the two table entries [size, 2] that each patch lies between, and their weights."""
    place = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    low = place.floor()
    share = place - low
    taps = torch.stack([low, low + 1], 1).long().clamp_(max=side - 1)
    return taps, torch.stack([1 - share, share], 1)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
