"""Which rows of a packed batch belong together: neighbours of equal length, and tiles for a GPU's kernel."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Run:
    """``count`` neighbouring segments of ``length`` rows each, from row ``start`` on."""

    start: int
    length: int
    count: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length * self.count)


def runs(lengths: Iterable[int]) -> tuple[Run, ...]:
    """The segments of a packed batch, neighbours of equal length together."""
    found, start = [], 0
    for length, group in groupby(lengths):
        count = sum(1 for _ in group)
        found.append(Run(start, length, count))
        start += length * count
    return tuple(found)


class Tiles:
    """Segments as Triton's kernel reads them, in memory that stays: ``table`` int32 [n, 4], in tiles of up to
    ``rows`` rows. A forward that was captured over them attends as they were filled last."""

    def __init__(self, room: int, longest: int, device: torch.device, dtype: torch.dtype) -> None:
        """For up to ``room`` tiles, of segments of up to ``longest`` rows each. A segment takes one for each
        ``rows`` of its rows, and one for the rest."""
        from mmserve.models.ops.triton import varlen_attention

        self.rows = varlen_attention.tile_rows(longest, dtype)
        self.table = torch.zeros(room, varlen_attention.FIELDS, dtype=torch.int32, device=device)

    def fill(self, segments: Sequence[Run]) -> None:
        """ValueError when there is no room for them."""
        found = self.cut(segments)
        if len(found) > len(self.table):
            raise ValueError(f"{len(found)} tiles; there is room for {len(self.table)}")
        self.table[: len(found)].copy_(_to(found, self.table.device))
        self.table[len(found) :] = 0

    def cut(self, segments: Sequence[Run]) -> npt.NDArray[np.int32]:
        """``segments`` as rows of ``table``."""
        from mmserve.models.ops.triton import varlen_attention

        return varlen_attention.tiles_of(
            (
                (start, start + run.length)
                for run in segments
                for start in range(run.start, run.start + run.length * run.count, run.length)
            ),
            self.rows,
        )


def tiles_for(segments: tuple[Run, ...], like: torch.Tensor) -> Tiles:
    """Those of ``segments``, on the device of ``like`` and for its dtype. The last few are kept, since every
    block of a transformer cuts a batch alike, or in one of two ways."""
    return _tiles(segments, like.device, like.dtype)


@lru_cache(maxsize=64)
def _tiles(segments: tuple[Run, ...], device: torch.device, dtype: torch.dtype) -> Tiles:
    longest = max((run.length for run in segments), default=1)
    found = Tiles(0, longest, device, dtype)
    found.table = _to(found.cut(segments), device)
    return found


def _to(values: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """On ``device``, once it comes to it: from pinned memory, so that the host does not wait."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
