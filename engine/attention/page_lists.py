"""Page tables as the flat arrays that attention kernels read: the pages of one context after another's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from mmserve.engine.attention.base import Span
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pages import DUMMY_PAGE, Run

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Of each context its pages, in order, and its length in tokens (at least 1)."""

    pages: list[Ints]
    lengths: npt.NDArray[np.int64]
    page_size: int

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Pages of each that hold tokens."""
        return -(-self.lengths // self.page_size)

    @property
    def ends(self) -> Ints:
        """int32 [n + 1]: context i has pages [ends[i], ends[i + 1]) of ``flat``."""
        ends = np.zeros(len(self.pages) + 1, dtype=np.int32)
        np.cumsum(self.counts, out=ends[1:])
        return ends

    @property
    def last(self) -> Ints:
        """int32 [n]: tokens in each context's last page, 1 to page_size."""
        return (self.lengths - (self.counts - 1) * self.page_size).astype(np.int32)

    def flat(self) -> Ints:
        """All pages, int32."""
        return np.concatenate(self.pages) if self.pages else np.empty(0, np.int32)

    def padded(self, count: int) -> "Contexts":
        """Up to ``count`` contexts: those behind are one token of the dummy page each."""
        missing = count - len(self.pages)
        if not missing:
            return self
        dummies = [np.array([DUMMY_PAGE], np.int32)] * missing
        lengths = np.concatenate((self.lengths, np.ones(missing, np.int64)))
        return Contexts(self.pages + dummies, lengths, self.page_size)

    def split(self, shared: int, count: int) -> "tuple[Contexts, Contexts]":
        """(what the first ``count`` share, ``shared`` full pages, and the dummy page; what each has behind
        them). Those from ``count`` on keep all they have."""
        size = self.page_size
        dummy = np.array([DUMMY_PAGE], np.int32)
        common = Contexts([self.pages[0][:shared], dummy], np.array([shared * size, 1]), size)
        own = [pages[shared:] for pages in self.pages[:count]] + self.pages[count:]
        lengths = self.lengths.copy()
        lengths[:count] -= shared * size
        return common, Contexts(own, lengths, size)


class PageLists:
    """Page tables as arrays, remembered from one step to the next: most tables stay as they are.

    What is remembered belongs to the tables of the last step alone, so nothing outlives its request by more.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: dict[
            int, tuple[PageTable, list[Run], Ints]
        ] = {}  # by id; the table keeps its id its own

    def keep(self, spans: Iterable[Span]) -> None:
        """A step of ``spans`` begins: know their tables, and no others."""
        known = self._known
        self._known = {}
        for span in spans:
            table = span.table
            found = known.get(id(table))
            if found is None or found[1] != table.runs:
                found = (table, list(table.runs), table.pages())
            self._known[id(table)] = found

    def contexts(self, spans: Sequence[Span]) -> Contexts:
        """All tokens of each span's request up to the span's end."""
        lengths = np.array([span.stop for span in spans], dtype=np.int64)
        counts = (-(-lengths // self._page_size)).tolist()
        pages = [self._pages(span)[:count] for span, count in zip(spans, counts, strict=True)]
        return Contexts(pages, lengths, self._page_size)

    def slots(self, spans: Sequence[Span], num_rows: int) -> Ints:
        """Where each row's key and value go, int32 [num_rows]; -1 for rows in no span."""
        slots = np.full(num_rows, -1, dtype=np.int32)
        for span in spans:
            tokens = np.arange(span.start, span.stop)
            pages = self._pages(span)[tokens // self._page_size]
            slots[span.row : span.row + len(span)] = pages * self._page_size + tokens % self._page_size
        return slots

    def newest_slots(self, spans: Sequence[Span], num_rows: int) -> Ints:
        """``slots`` where each span is one token, and the n-th stands in row n."""
        slots = np.full(num_rows, -1, dtype=np.int32)
        newest = np.array([span.start for span in spans], dtype=np.int64)
        places = (newest // self._page_size).tolist()
        pages = [self._pages(span)[place] for span, place in zip(spans, places, strict=True)]
        slots[: len(spans)] = np.array(pages, np.int32) * self._page_size + newest % self._page_size
        return slots

    def _pages(self, span: Span) -> Ints:
        return self._known[id(span.table)][2]


def shared_pages(spans: Sequence[Span], page_size: int) -> int:
    """Full pages that the contexts of all ``spans`` begin with; each has a token behind them."""
    first = spans[0].table.runs
    shared = min(span.start for span in spans) // page_size
    for span in spans[1:]:
        shared = min(shared, common_pages(first, span.table.runs))
        if not shared:
            break
    return shared


def common_pages(some: list[Run], others: list[Run]) -> int:
    """Pages with which both begin."""
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))
    pages = sum(stop - start for start, stop in some[:equal])
    if equal < min(len(some), len(others)) and some[equal][0] == others[equal][0]:
        pages += min(some[equal][1], others[equal][1]) - some[equal][0]
    return pages
