"""Page tables in lanes: a copy that follows what is told is right at every step, and little is told."""

import random

import numpy as np
import pytest

from mmserve.engine.attention.page_lanes import PageLanes
from mmserve.engine.kv.page_table import PageTable


class Follower:
    """A device's copy of ``lanes``."""

    def __init__(self, lanes):
        self.lanes = lanes
        self.copy = lanes.host.copy()
        self.told = 0

    def step(self, tables):
        numbers, (places, pages) = self.lanes.place(tables)
        self.copy.reshape(-1)[places] = pages
        self.told = len(places)
        assert len(set(numbers.tolist())) == len(tables)
        for number, table in zip(numbers, tables, strict=True):
            width = min(table.num_pages, self.copy.shape[1])
            if width:
                assert np.array_equal(self.copy[number, :width], table.pages()[:width])
        return numbers


def table_of(*runs):
    table = PageTable(4)
    table.extend(list(runs))
    return table


def test_only_new_pages_are_told():
    follower = Follower(PageLanes(3, 40))
    first, second = table_of((1, 21)), table_of((30, 40))
    follower.step([first, second])
    assert follower.told == 30
    follower.step([first, second])
    assert follower.told == 0
    first.extend([(21, 22)])  # goes on in its run
    second.extend([(50, 53)])
    follower.step([second, first])
    assert follower.told == 4


def test_a_table_that_began_anew_or_was_cut_is_told_anew_from_where_it_differs():
    follower = Follower(PageLanes(2, 40))
    table = table_of((1, 11), (20, 25))
    follower.step([table])
    table.replace(4, [(90, 94)])
    follower.step([table])
    assert follower.told == 15
    table.clear()
    table.extend([(90, 92), (3, 5)])
    follower.step([table])
    assert follower.told == 2
    table.clear()
    follower.step([table])
    assert follower.told == 0


def test_a_request_keeps_its_lane_until_another_needs_it():
    follower = Follower(PageLanes(2, 8))
    a, b, c = table_of((1, 2)), table_of((2, 3)), table_of((3, 4))
    lane_a, lane_b = follower.step([a, b])
    assert follower.step([b]) == [lane_b]
    assert follower.step([c, b]).tolist() == [lane_a, lane_b]
    follower.step([b])
    assert follower.step([a]) == [lane_a]  # of c, which was used before b
    with pytest.raises(ValueError, match="3 requests in one step; there is room for 2"):
        follower.lanes.place([a, b, c])


def test_any_traffic_is_followed():
    rng = random.Random(0)
    follower, tables, page = Follower(PageLanes(4, 12)), [], 1
    for _ in range(400):
        if len(tables) < 7 and rng.random() < 0.3:
            tables.append(PageTable(4))
        for table in tables:
            if rng.random() < 0.5:
                page += rng.choice([0, 0, 5])
                table.extend([(page, page + rng.randint(1, 2))])
                page += 2
            if rng.random() < 0.1:
                table.clear()
            elif table.num_pages > 2 and rng.random() < 0.1:
                table.replace(2, [(page, page + 2)])
                page += 2
        tables = [table for table in tables if rng.random() > 0.05]
        follower.step(rng.sample(tables, min(len(tables), rng.randint(0, 4))))
