"""Page tables where a GPU reads them: a lane for each request, told only what is new since the last step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmserve.engine.attention.page_lists import common_pages
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pages import Run

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Lane:
    number: int
    table: PageTable  # kept, so that no other table can have its id
    runs: list[Run]  # of pages, as they were when last told


class PageLanes:
    """``host`` int32 [lanes, pages]: page i of a request stands in column i of its lane. Whoever keeps a copy
    on a device applies what ``place`` returns.

    A request keeps its lane from step to step. A lane whose request was not in a step goes to a new one when
    no lane is free; the request that lost it gets another when it comes back.
    """

    def __init__(self, lanes: int, pages: int) -> None:
        self.host = np.zeros((lanes, pages), dtype=np.int32)
        self._lanes: dict[int, _Lane] = {}  # by the table's id, the least lately used first

    def place(self, tables: Sequence[PageTable]) -> tuple[Ints, tuple[Ints, Ints]]:
        """The lane of each of ``tables``, int32 [n], and what has changed: places in the flattened ``host``,
        and the pages that stand there now. ValueError for more tables than there are lanes."""
        if len(tables) > len(self.host):
            raise ValueError(f"{len(tables)} requests in one step; there is room for {len(self.host)}")
        known = [self._lanes.pop(id(table), None) for table in tables]
        for lane in known:
            if lane is not None:
                self._lanes[id(lane.table)] = lane
        places: list[Ints] = []
        lanes = [lane or self._new(table) for lane, table in zip(known, tables, strict=True)]
        for lane in lanes:
            if lane.runs != lane.table.runs:
                places.append(self._renew(lane))
        changed = np.concatenate(places) if places else np.empty(0, np.int32)
        numbers = np.array([lane.number for lane in lanes], dtype=np.int32)
        return numbers, (changed, self.host.reshape(-1)[changed])

    def _new(self, table: PageTable) -> _Lane:
        count = len(self._lanes)
        number = count if count < len(self.host) else self._lanes.pop(next(iter(self._lanes))).number
        lane = self._lanes[id(table)] = _Lane(number, table, [])
        return lane

    def _renew(self, lane: _Lane) -> Ints:
        """The places that differ from what was told before, which is known of whole runs of pages."""
        table, width = lane.table, self.host.shape[1]
        first, stop = common_pages(lane.runs, table.runs), min(table.num_pages, width)
        lane.runs = list(table.runs)
        if first >= stop:
            return np.empty(0, np.int32)
        pages = [np.arange(a, b, dtype=np.int32) for a, b in table.between(first, stop)]
        self.host[lane.number, first:stop] = np.concatenate(pages)
        return np.arange(first, stop, dtype=np.int32) + np.int32(lane.number * width)
