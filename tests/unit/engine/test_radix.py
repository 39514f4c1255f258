"""The prefix cache: what is found is what was put in, and no page is lost or owned twice."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine.kv.pages import PageAllocator
from mmserve.engine.kv.radix import RadixCache, runs_of


def keys(*values):
    return np.array(values, np.int64)


def pages(*values):
    return np.array(values, np.int32)


def flat(runs):
    return [page for start, stop in runs for page in range(start, stop)]


def cache_of(*chains, page_size=1):
    """A cache with the given (keys, pages)."""
    cache = RadixCache(page_size)
    for k, p in chains:
        cache.insert(keys(*k), pages(*p))
    return cache


def test_the_longest_common_prefix_is_found_inside_a_node():
    cache = cache_of(((1, 2, 3, 4), (5, 6, 7, 8)))
    found = cache.match(keys(1, 2, 9))
    assert found.length == 2
    assert flat(cache.path(found.node)) == [5, 6]
    assert cache.length(keys(1, 2, 3, 4, 5)) == 4
    cache.check_integrity()


def test_a_second_prefix_gives_only_what_is_new():
    cache = cache_of(((1, 2, 3), (5, 6, 7)))
    found = cache.insert(keys(1, 2, 8), pages(9, 10, 11))
    assert found.length == 2
    assert flat(cache.path(found.node)) == [5, 6, 11]
    assert cache.pages == 4


def test_only_whole_pages_are_shared():
    cache = cache_of(((1, 2, 3, 4), (5, 6)), page_size=2)
    assert cache.match(keys(1, 2, 3)).length == 2
    assert cache.match(keys(1, 2, 3, 9)).length == 2
    assert cache.match(keys(1, 9)).length == 0


def test_salts_do_not_meet():
    cache = cache_of(((1, 2), (5, 6)))
    assert cache.match(keys(1, 2), ("mine", None)).length == 0
    cache.insert(keys(1, 2), pages(7, 8), ("mine", None))
    assert flat(cache.path(cache.match(keys(1, 2), ("mine", None)).node)) == [7, 8]
    assert flat(cache.path(cache.match(keys(1, 2)).node)) == [5, 6]


def test_the_least_recently_used_leaf_goes_first_and_from_its_end():
    cache = cache_of(((1, 2, 3), (5, 6, 7)), ((1, 8, 9), (5, 10, 11)))
    for wanted in ((1, 8, 9), (1, 2, 3)):
        node = cache.match(keys(*wanted)).node
        cache.lock(node)
        cache.unlock(node)
    assert flat(cache.evict(1)) == [11]
    assert flat(cache.evict(2)) == [10, 7]
    assert cache.length(keys(1, 2, 3)) == 2
    cache.check_integrity()


def test_what_is_locked_stays_and_so_does_all_above_it():
    cache = cache_of(((1, 2, 3), (5, 6, 7)), ((1, 2, 4), (5, 6, 8)))
    node = cache.match(keys(1, 2, 3)).node
    cache.lock(node)
    assert flat(cache.clear()) == [8]
    assert cache.length(keys(1, 2, 3)) == 3
    cache.unlock(node)
    assert sorted(flat(cache.clear())) == [5, 6, 7]
    assert cache.pages == 0
    cache.check_integrity()


def test_a_lock_holds_for_both_halves_of_a_node_that_is_split_later():
    cache = cache_of(((1, 2, 3, 4), (5, 6, 7, 8)))
    node = cache.match(keys(1, 2, 3, 4)).node
    cache.lock(node)
    cache.match(keys(1, 2, 9))
    assert cache.clear() == []
    cache.unlock(node)
    assert cache.evictable == 4
    cache.check_integrity()


def test_a_salt_that_was_only_asked_for_leaves_nothing():
    cache = RadixCache(1)
    for i in range(100):
        cache.match(keys(1), (str(i), None))
    assert not cache._roots
    cache.insert(keys(1), pages(1), ("a", None))
    cache.clear()
    assert not cache._roots


def test_what_is_demoted_goes_first_but_for_what_is_locked():
    mine, yours = ("mine", None), ("yours", None)
    cache = RadixCache(1)
    cache.insert(keys(1, 2, 3), pages(5, 6, 7), yours)
    cache.insert(keys(1, 2), pages(8, 9), mine)
    cache.insert(keys(1, 4), pages(8, 10), mine)
    node = cache.match(keys(1, 4), mine).node
    cache.lock(node)
    cache.demote(mine)
    cache.check_integrity()
    assert flat(cache.evict(1)) == [9]
    assert flat(cache.evict(1)) == [7]
    cache.unlock(node)
    assert sorted(flat(cache.evict(2))) == [8, 10]
    assert cache.length(keys(1, 2), yours) == 2
    cache.check_integrity()


def test_demoting_what_is_not_there_changes_nothing():
    cache = cache_of(((1, 2), (5, 6)))
    cache.demote(("nobody", None))
    cache.check_integrity()


def test_using_one_leaf_for_ever_does_not_grow_the_heap():
    cache = cache_of(((1, 2), (5, 6)))
    node = cache.match(keys(1, 2)).node
    for _ in range(1000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._leaves) < 100
    assert flat(cache.evict(1)) == [6]


@pytest.mark.parametrize("numbers", [[], [3], [3, 4, 5], [5, 3, 4, 9], [4, 3, 2]])
def test_runs_of_pages(numbers):
    assert flat(runs_of(pages(*numbers))) == numbers
    assert len(runs_of(pages(*numbers))) == len(numbers) - sum(
        b == a + 1 for a, b in itertools.pairwise(numbers)
    )


class Traffic:
    """Requests over a small pool; remembers what each page was filled with."""

    def __init__(self, page_size, total):
        self.cache, self.pages = RadixCache(page_size), PageAllocator(total)
        self.size = page_size
        self.content = {}
        self.running = []

    def begin(self, values, salt):
        k = keys(*values[: len(values) - len(values) % self.size])
        found = self.cache.match(k, salt)
        assert found.length == self.cache.length(k, salt)
        held = flat(self.cache.path(found.node))
        assert [self.content[p] for p in held] == self.contents(k, salt)[: len(held)]
        self.cache.lock(found.node)
        missing = len(k) // self.size - len(held)
        if missing > self.pages.free:
            self.pages.release(self.cache.evict(missing - self.pages.free))
        runs = self.pages.allocate(missing)
        if runs is None:
            self.cache.unlock(found.node)
            return
        own = flat(runs)
        self.content.update(zip(own, self.contents(k, salt)[len(held) :], strict=True))
        self.running.append((k, salt, found, held, own))

    def contents(self, k, salt):
        """What each page holds depends on all before it."""
        return [(salt, tuple(k[: i + self.size])) for i in range(0, len(k), self.size)]

    def end(self, index, publish):
        k, salt, found, held, own = self.running.pop(index % len(self.running))
        kept = 0
        if publish:
            kept = self.cache.insert(k, pages(*held, *own), salt).length // self.size - len(held)
        mine = own[:kept] if publish else own
        self.pages.release([(p, p + 1) for p in mine])
        self.cache.unlock(found.node)

    def check(self):
        self.cache.check_integrity()
        self.pages.check_integrity()
        own = sum(len(r[4]) for r in self.running)
        assert self.pages.in_use == self.cache.pages + own
        for k, salt, found, _, _ in self.running:
            assert self.cache.length(k, salt) >= found.length, "a locked prefix went"


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.lists(st.integers(0, 2), max_size=9), st.sampled_from("ab")),
        st.tuples(st.just("end"), st.integers(0, 9), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from([1, 2]), st.integers(4, 24))
def test_any_traffic_conserves_pages_and_finds_what_was_computed(steps, page_size, total):
    traffic = Traffic(page_size, total)
    for kind, *arguments in steps:
        if kind == "begin":
            traffic.begin(arguments[0], (arguments[1], None))
        elif traffic.running:
            traffic.end(*arguments)
        traffic.check()
    while traffic.running:
        traffic.end(0, True)
    traffic.pages.release(traffic.cache.clear())
    assert traffic.pages.in_use == 0
    assert traffic.cache.pages == 0
    traffic.check()
