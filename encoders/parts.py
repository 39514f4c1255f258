"""Arithmetic in bounded parts, so that others get their turn in the middle of a large picture.

A function of this package that computes in parts is a generator: it yields the work of each part, in
floating-point operations, when that part is done, and returns its result at the end. Where the cuts lie
depends on shapes alone, so the result is the same bit for bit wherever somebody pauses.
"""

import time
from collections.abc import Generator, Iterator
from math import inf
from typing import Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")
Parts = Generator[float, None, T]

ROWS = 128  # patches of a part on a CPU, a multiple of merge^2: some 15 ms of a block 768 wide


def row_parts(rows: torch.Tensor, most: int = ROWS) -> Iterator[slice]:
    """Slices that cover the first axis of ``rows``: of ``most`` rows on a CPU, all of it elsewhere."""
    count = rows.shape[0]
    step = most if rows.device.type == "cpu" else max(count, 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def row_work(*modules: nn.Module) -> float:
    """Operations of one row in the matrices of ``modules``; to be asked before they are packed."""
    return 2.0 * sum(p.numel() for m in modules for p in m.parameters() if p.dim() > 1)


class Resumable(Generic[T]):
    """A computation in parts that goes on when it is told to. ``result`` is there once it is ``done``."""

    def __init__(self, parts: Parts[T]) -> None:
        self._parts = parts
        self.done = False
        self.result: T

    @torch.inference_mode()
    def advance(self, work: float, seconds: float = inf) -> float:
        """Compute parts until they make up about ``work`` or all is done; returns what they made up. One part
        is always computed; none is begun when less is left than half of the last, or after ``seconds``."""
        spent = last = 0.0
        latest = inf if seconds == inf else time.perf_counter() + seconds
        while not self.done:
            try:
                last = next(self._parts)
            except StopIteration as end:
                self.result, self.done, last = end.value, True, 0.0
            spent += last
            if spent + last / 2 >= work or (latest < inf and time.perf_counter() >= latest):
                break
        return spent

    def finish(self) -> T:
        self.advance(float("inf"))
        return self.result
