"""Cells of a clip that show nothing new, chosen before the model sees it.

A *cell* is what one vision token stands for: a square of ``patch * merge`` pixels. Frames of a scene at rest
are alike but for a few cells, and those that stay as they were need not be said again: their tokens are left
out, and the others stand at the positions that they have in the whole grid. (The encoder still sees the whole
item, so the tokens that are kept know of all of it.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from mmserve.preprocess.spec import ProcessorSpec

# Levels of 255 by which the mean of a block must differ to be a change. A cell of 28 or 32 pixels is compared
# in 4 x 4 blocks, so what is small is seen if it is plain: a third of a block that changes by 24 levels. A
# sensor's noise of 8 levels a pixel is one in the mean of a block, and some 6 the largest of a whole frame.
VISIBLE = 8
BLOCKS = (4, 2, 1)  # of a cell's side: the most that divide it


class Pruned(NamedTuple):
    """``kept[i]`` are the cells of item i that stay, int32 and ascending, counted along the rows of its grid;
    None for all. ``reference`` uint8 [2, h, w, 3] is what was last kept in each place: the darkest and the
    brightest that each block was in the frames of its item."""

    kept: tuple[np.ndarray | None, ...]
    reference: np.ndarray


def prune(
    items: Sequence[np.ndarray], spec: ProcessorSpec, rate: float, reference: np.ndarray | None = None
) -> Pruned:
    """Which cells of ``items``, uint8 [frames, H, W, 3] each and of one size, say something.

    A cell may be left out if in all frames of its item it differs by less than ``VISIBLE`` from all frames of
    what was last kept in its place: so what changes slowly is kept when it has changed enough, and what
    moved through is kept once more at rest. At most ``rate`` of all cells are left out, those that changed
    least. Without a ``reference`` of that size the first item is whole; no item is left without a cell.
    """
    side = _blocks(spec)
    block = spec.patch * spec.merge // side
    looks = np.stack([_extremes(item, block) for item in items])
    if reference is not None and reference.shape != looks.shape[1:]:
        reference = None
    rows, columns = looks.shape[2] // side, looks.shape[3] // side
    walk = _Walk(looks, reference, side)
    changes, kept, last = walk.through(np.ones((len(items), rows * columns), bool))
    most = int(rate * kept.size)
    if kept.size - np.count_nonzero(kept) > most:
        _, kept, last = walk.through(_least(changes, ~kept, most))
    last.setflags(write=False)
    return Pruned(tuple(map(_cells, kept)), last)


class _Walk:
    """Item after item, each cell against what was last kept in its place."""

    def __init__(self, looks: np.ndarray, reference: np.ndarray | None, side: int) -> None:
        self.looks = looks  # [items, 2, h, w, 3]
        self.reference = reference
        self.side = side

    def through(self, droppable: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(changes, kept, last): by how much each cell [items, cells] has changed, whether it is kept where
        only those ``droppable`` may be dropped, and what was last kept."""
        changes = np.full(droppable.shape, 256, np.int16)
        kept = np.ones(droppable.shape, bool)
        first = 0 if self.reference is not None else 1
        last = self.looks[0].copy() if self.reference is None else self.reference.copy()
        for i in range(first, len(self.looks)):
            changes[i] = self._change(self.looks[i], last)
            kept[i] = (changes[i] >= VISIBLE) | ~droppable[i]
            kept[i, changes[i].argmax()] |= not kept[i].any()
            self._keep(kept[i], self.looks[i], last)
        return changes, kept, last

    def _change(self, look: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Of each cell, the most by which a frame of ``look`` differs from one of ``last`` in any block."""
        (low, high), (last_low, last_high) = look.astype(np.int16), last.astype(np.int16)
        blocks = np.maximum(high - last_low, last_high - low)
        height, width = blocks.shape[0] // self.side, blocks.shape[1] // self.side
        most: np.ndarray = blocks.reshape(height, self.side, width, self.side * 3).max((1, 3))
        return most.reshape(-1)

    def _keep(self, kept: np.ndarray, look: np.ndarray, last: np.ndarray) -> None:
        cells = kept.reshape(look.shape[1] // self.side, -1)
        blocks = cells.repeat(self.side, 0).repeat(self.side, 1)
        last[:, blocks] = look[:, blocks]


def _least(changes: np.ndarray, dropped: np.ndarray, most: int) -> np.ndarray:
    """The ``most`` of the ``dropped`` cells that changed least; equal ones are taken from all items alike."""
    items, cells = np.nonzero(dropped)
    by_item = np.lexsort((cells, changes[items, cells], items))
    starts = np.searchsorted(items, items)  # where each one's item begins
    rank = np.arange(len(items)) - starts  # in its item, the least changed first
    items, cells = items[by_item], cells[by_item]
    chosen = np.lexsort((items, rank, changes[items, cells]))[:most]
    least = np.zeros(changes.shape, bool)
    least[items[chosen], cells[chosen]] = True
    return least


def _extremes(item: np.ndarray, block: int) -> np.ndarray:
    """The means of blocks of ``block`` pixels square, least and most of all frames: uint8 [2, h, w, 3]."""
    means = np.stack([np.asarray(Image.fromarray(frame).reduce(block)) for frame in item])
    return np.stack((means.min(0), means.max(0)))


def _blocks(spec: ProcessorSpec) -> int:
    return next(side for side in BLOCKS if spec.patch * spec.merge % side == 0)


def _cells(kept: np.ndarray) -> np.ndarray | None:
    if kept.all():
        return None
    cells = np.flatnonzero(kept).astype(np.int32)
    cells.setflags(write=False)
    return cells
