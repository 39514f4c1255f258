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

    def clear(self) -> list[Run]:
        """Forget all pages; returns them so that the caller, who now owns them, frees them."""
        runs, self.runs = self.runs, []
        self.num_pages = self.capacity = 0
        return runs

    def slot_runs(self, start: int, stop: int) -> list[SlotRun]:
        """The slots of tokens [start, stop), as few contiguous ranges as the pages allow."""
        size = self.page_size
        found, first = [], 0
        for left, right in self.runs:
            last = first + (right - left) * size
            if start < last and first < stop:
                base = left * size - first
                found.append((base + max(start, first), base + min(stop, last)))
            first = last
        return found

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The slot of each token in [start, stop)."""
        return np.concatenate([np.arange(a, b) for a, b in self.slot_runs(start, stop)])

    def pages(self) -> npt.NDArray[np.int32]:
        """Page numbers in order, as GPU attention kernels want them."""
        return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in self.runs])
