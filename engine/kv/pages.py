"""Who may write where in the KV pool: pages handed out in runs that stay contiguous where they can."""

import heapq
from itertools import pairwise

import numpy as np

Run = tuple[int, int]  # half-open range of page numbers

DUMMY_PAGE = 0  # padding rows write here; it is never handed out


class PageAllocator:
    """Pages ``1 .. total - 1``; each is free or in use by one owner.

        1            start        stop             total
        |- in use ----|--- free ---|---- in use -----|        runs of free pages never touch each other

    A request whose pages follow one another is read by attention as one slice, without a gather. So
    pages that continue a request's last run are preferred; else the largest free run is opened, in
    its middle when someone's pages end where it starts, which leaves both of them room to grow.
    """

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ValueError(f"a KV pool needs a page beside the dummy page, not {total} in all")
        self.total = total
        self.free = 0
        self._stops: dict[int, int] = {}  # free run: start -> stop
        self._starts: dict[int, int] = {}  # free run: stop -> start
        self._largest: list[tuple[int, int]] = []  # heap of (-length, start); entries may be outdated
        self._used = np.zeros(total, dtype=bool)
        self._open(1, total)

    @property
    def in_use(self) -> int:
        return self.total - 1 - self.free

    def allocate(self, count: int, after: int | None = None) -> list[Run] | None:
        """``count`` pages as runs in the order of use, or None (and nothing taken) when fewer are free.

        ``after`` is the page that the first should follow.
        """
        if count > self.free:
            return None
        if after is not None and self._stops.get(after + 1, 0) > after + count:
            return [self._take(after + 1, after + 1, count)]
        runs = []
        if after is not None and after + 1 in self._stops:
            runs.append(self._take(after + 1, after + 1, count))
        while (missing := count - sum(stop - start for start, stop in runs)) > 0:
            start, stop = self._largest_run()
            spare = max(stop - start - missing, 0)
            borders = start > 1 and (after is None or start != after + 1)
            runs.append(self._take(start, start + (spare // 2 if borders else 0), missing))
        return runs

    def release(self, runs: list[Run]) -> None:
        """Give pages back. AssertionError when one of them is free already."""
        for start, stop in runs:
            assert self._used[start:stop].all(), f"pages {start} to {stop - 1} are not all in use"
            self._used[start:stop] = False
            self._open(self._starts.get(start, start), self._stops.get(stop, stop))

    def check_integrity(self) -> None:
        """AssertionError unless free + in use = total and the free runs are whole, apart and unused."""
        runs = sorted(self._stops.items())
        assert {stop: start for start, stop in runs} == self._starts
        assert all(a[1] < b[0] for a, b in pairwise(runs)), "free runs touch"
        assert not any(self._used[start:stop].any() for start, stop in runs), "a free page is in use"
        free, used = sum(stop - start for start, stop in runs), int(self._used.sum())
        assert free == self.free, f"{free} pages are free, {self.free} accounted"
        assert free + used == self.total - 1, f"{free} free + {used} in use of {self.total - 1} pages"

    def _take(self, run: int, start: int, count: int) -> Run:
        """Up to ``count`` pages from ``start`` on, inside the free run that begins at ``run``."""
        run_stop = self._stops[run]
        stop = min(start + count, run_stop)
        self._close(run)
        for left, right in ((run, start), (stop, run_stop)):
            if left < right:
                self._open(left, right)
        self._used[start:stop] = True
        return start, stop

    def _open(self, start: int, stop: int) -> None:
        """Make [start, stop) one free run; runs inside it are joined."""
        if start in self._stops:
            self._close(start)
        if stop in self._starts:
            self._close(self._starts[stop])
        self._stops[start], self._starts[stop] = stop, start
        self.free += stop - start
        heapq.heappush(self._largest, (start - stop, start))

    def _close(self, start: int) -> None:
        stop = self._stops.pop(start)
        del self._starts[stop]
        self.free -= stop - start

    def _largest_run(self) -> Run:
        if len(self._largest) > 4 * len(self._stops) + 64:
            self._largest = [(start - stop, start) for start, stop in self._stops.items()]
            heapq.heapify(self._largest)
        while True:
            length, start = self._largest[0]
            if self._stops.get(start) == start - length:
                return start, start - length
            heapq.heappop(self._largest)
