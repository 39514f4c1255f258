import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pages import DUMMY_PAGE, PageAllocator


def pages_of(runs):
    return [page for start, stop in runs for page in range(start, stop)]


def test_the_dummy_page_is_never_handed_out():
    pages = PageAllocator(9)
    assert DUMMY_PAGE not in pages_of(pages.allocate(8))
    assert pages.allocate(1) is None


def test_a_request_that_grows_stays_in_one_run():
    pages, table = PageAllocator(1000), PageTable(16)
    table.extend(pages.allocate(20))
    pages.allocate(20)  # a neighbour
    for _ in range(100):
        table.extend(pages.allocate(1, table.last_page))
    assert len(table.runs) == 1
    assert table.capacity == 120 * 16


def test_fragments_are_gathered_when_no_run_is_long_enough():
    pages = PageAllocator(11)
    singles = [pages.allocate(1) for _ in range(10)]
    for runs in singles[::2]:
        pages.release(runs)
    assert len(pages_of(pages.allocate(5))) == 5
    pages.check_integrity()


def test_freeing_twice_is_an_error():
    pages = PageAllocator(8)
    runs = pages.allocate(3)
    pages.release(runs)
    with pytest.raises(AssertionError, match="not all in use"):
        pages.release(runs)


@given(st.integers(2, 60), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=60))
def test_pages_are_conserved_and_never_shared(total, moves):
    """Five tables grow and are freed at random; each page is free or in exactly one of them."""
    pages = PageAllocator(total)
    tables = [PageTable(4) for _ in range(5)]
    for owner, count in moves:
        table = tables[owner]
        runs = pages.allocate(count, table.last_page)
        if runs is None:
            pages.release(table.runs)
            table.clear()
        else:
            assert len(pages_of(runs)) == count
            table.extend(runs)
        pages.check_integrity()
        held = [page for t in tables for page in pages_of(t.runs)]
        assert len(held) == len(set(held)) == pages.in_use


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_slot_runs_and_slots_agree(counts, page_size, data):
    table, first = PageTable(page_size), 1
    for count in counts:
        table.extend([(first, first + count)])
        first += count + data.draw(st.integers(0, 2))
    stop = data.draw(st.integers(1, table.capacity))
    start = data.draw(st.integers(0, stop - 1))
    expected = [page * page_size + offset for page in table.pages() for offset in range(page_size)]
    assert table.slots(start, stop).tolist() == expected[start:stop]
    assert [s for a, b in table.slot_runs(start, stop) for s in range(a, b)] == expected[start:stop]


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 12), st.integers(0, 12))
def test_a_part_of_a_table_is_the_pages_in_that_range(counts, start, stop):
    table, first = PageTable(4), 3
    for count in counts:
        table.extend([(first, first + count)])
        first += count + 2
    assert pages_of(table.between(start, stop)) == pages_of(table.runs)[start:stop]


def test_other_pages_may_stand_for_the_first_ones():
    table = PageTable(4)
    table.extend([(5, 9)])
    table.replace(2, [(20, 22)])
    assert table.runs == [(20, 22), (7, 9)]
    assert table.capacity == 16
