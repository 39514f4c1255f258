"""What a decoder is given beside its bytes: where pixels go, whether anyone still waits, what it cost."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

Allocate = Callable[[tuple[int, ...]], np.ndarray]


class Cancelled(Exception):
    """Nobody waits for the result any more; the work was given up between two of its steps."""


def heap(shape: tuple[int, ...]) -> np.ndarray:
    """A writable uint8 array in this process's own memory."""
    return np.empty(shape, np.uint8)


def always() -> None:
    """The check of a caller who never leaves."""


@dataclass
class Stages:
    """Seconds spent in each stage; those of ``core.metrics.STAGES`` and demux."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


@dataclass
class Work:
    """One job of decoding. ``allocate`` gives the uint8 memory for the resized pixels, asked for once their
    shape is known and before the resize; ``check`` raises Cancelled between frames when nobody waits."""

    allocate: Allocate = heap
    check: Callable[[], None] = always
    stages: Stages = field(default_factory=Stages)
