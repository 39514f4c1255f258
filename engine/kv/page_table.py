"""Which pages of the pool hold one request's tokens, in order."""

import numpy as np
import numpy.typing as npt

from mmserve.engine.kv.pages import Run

SlotRun = tuple[int, int]  # half-open range of slots; slot = page * page_size + offset


class PageTable:
    """Token i of the request lives in page i // page_size of the table, kept as runs of pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.capacity = 0  # tokens that the pages can hold
        self.runs: list[Run] = []

    @property
    def last_page(self) -> int | None:
        return self.runs[-1][1] - 1 if self.runs else None

    def pages_missing(self, tokens: int) -> int:
        """How many more pages ``tokens`` tokens need."""
        return -(-tokens // self.page_size) - self.num_pages

    def extend(self, runs: list[Run]) -> None:
        for start, stop in runs:
            self.num_pages += stop - start
            if self.runs and self.runs[-1][1] == start:
                start = self.runs.pop()[0]
            self.runs.append((start, stop))
        self.capacity = self.num_pages * self.page_size

    def clear(self) -> None:
        """Forget all pages; who owns them frees them."""
        self.runs = []
        self.num_pages = self.capacity = 0

    def between(self, start: int, stop: int) -> list[Run]:
        """Pages ``start`` to ``stop`` of the table."""
        return _cut(self.runs, start, stop)

    def replace(self, count: int, runs: list[Run]) -> None:
        """Let ``runs``, of ``count`` pages, stand for the first ``count`` ones."""
        rest = self.between(count, self.num_pages)
        self.clear()
        self.extend(runs + rest)

    def slot_runs(self, start: int, stop: int) -> list[SlotRun]:
        """The slots of tokens [start, stop), as few contiguous ranges as the pages allow."""
        size = self.page_size
        return _cut([(left * size, right * size) for left, right in self.runs], start, stop)

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The slot of each token in [start, stop)."""
        return np.concatenate([np.arange(a, b) for a, b in self.slot_runs(start, stop)])

    def pages(self) -> npt.NDArray[np.int32]:
        """Page numbers in order, as GPU attention kernels want them."""
        return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in self.runs])


def _cut(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Of the numbers that ``runs`` list, those from the ``start``-th to before the ``stop``-th."""
    found, first = [], 0
    for left, right in runs:
        last = first + right - left
        if start < last and first < stop:
            found.append((left - first + max(start, first), left - first + min(stop, last)))
        first = last
    return found
