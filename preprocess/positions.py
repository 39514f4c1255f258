"""Three-axis rotary positions (time, height, width) of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Block:
    """Consecutive vision tokens that share one origin: an image, a frame pair, or a whole clip.

    ``start`` is the first token's place in the prompt, ``grid`` its (time, height, width) in merged
    tokens, ``interval`` the step of the time axis. ``kept`` are, for each temporal patch, the cells of its
    grid that stand in the prompt, ascending, and None for all; empty where all of all do.
    """

    start: int
    grid: tuple[int, int, int]
    interval: float = 1.0
    kept: tuple[np.ndarray | None, ...] = ()

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each temporal patch."""
        cells = self.grid[1] * self.grid[2]
        return tuple(cells if own is None else len(own) for own in self._kept)

    def standing(self) -> np.ndarray:
        """The cells that stand in the prompt, int64 [count], counted through all temporal patches."""
        cells = np.arange(self.grid[0] * self.grid[1] * self.grid[2]).reshape(self.grid[0], -1)
        pairs = zip(cells, self._kept, strict=True)
        return np.concatenate([row if own is None else row[own] for row, own in pairs])

    @property
    def _kept(self) -> tuple[np.ndarray | None, ...]:
        return self.kept or (None,) * self.grid[0]

    def clock(self) -> np.ndarray:
        """Time positions of the block's temporal patches from its origin, int64 [T].

        Computed in float32 and truncated, as the models were trained.
        """
        steps = np.arange(self.grid[0], dtype=np.float32) * np.float32(self.interval)
        return steps.astype(np.int64)


def mrope(count: int, blocks: Sequence[Block]) -> tuple[np.ndarray, int]:
    """(positions int32 [3, count], delta) of a prompt of ``count`` tokens; ``blocks`` in prompt order.

    Text counts up on all axes together and resumes at the largest position so far + 1. (transformers
    5.24 resumes at origin + max(height, width) instead, which differs for clips that are longer in time
    than that; the models' first release and vLLM do as here.) Cells that are left out leave gaps: others, and
    the text behind, stand where they would. Generated token number g stands at ``count + g + delta``.
    """
    positions = np.empty((3, count), np.int64)
    token = origin = 0
    for block in blocks:
        origin = _text(positions, token, block.start, origin)
        token = block.start + block.count
        whole = _vision(block) + origin
        positions[:, block.start : token] = whole if not block.kept else whole[:, block.standing()]
        origin = int(whole.max()) + 1
    origin = _text(positions, token, count, origin)
    return positions.astype(np.int32), origin - count


def _text(positions: np.ndarray, start: int, end: int, origin: int) -> int:
    positions[:, start:end] = np.arange(origin, origin + end - start)
    return origin + end - start


def _vision(block: Block) -> np.ndarray:
    _, height, width = block.grid
    axes = np.meshgrid(block.clock(), np.arange(height), np.arange(width), indexing="ij")
    return np.stack(axes).reshape(3, -1)
