"""The embedding pool: reference counts, eviction, and the bytes it accounts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.errors import MediaError
from mmserve.encoders.pool import EmbeddingPool, PoolFull


def features(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def name(i):
    return bytes([i]) * 32


def test_least_recently_used_idle_entry_goes_first():
    pool = EmbeddingPool(100)
    for i in range(4):
        pool.put(name(i), features(25))
    pool.acquire(name(0))
    pool.release(name(0))  # now the most recent
    pool.put(name(9), features(30))
    assert [i for i in range(4) if name(i) in pool] == [0, 3]
    assert pool.evictions == 2
    pool.check_integrity()


def test_held_entry_is_never_evicted():
    pool = EmbeddingPool(100)
    pool.put(name(0), features(60))
    assert pool.acquire(name(0)) is not None
    with pytest.raises(PoolFull, match="60 bytes in use"):
        pool.put(name(1), features(50))
    pool.put(name(2), features(40))
    pool.release(name(0))
    pool.put(name(1), features(50))
    assert name(1) in pool
    pool.check_integrity()


def test_item_larger_than_the_pool_is_a_clear_error():
    with pytest.raises(MediaError, match="raise encoder_cache_mib"):
        EmbeddingPool(100).put(name(0), features(101))


def test_release_without_acquire_is_an_error():
    pool = EmbeddingPool(100)
    pool.put(name(0), features(10))
    with pytest.raises(KeyError):
        pool.release(name(0))


def test_acquire_of_an_unknown_digest_is_none():
    assert EmbeddingPool(10).acquire(name(1)) is None


STEPS = st.tuples(
    st.sampled_from(["put", "acquire", "release", "clear"]), st.integers(0, 7), st.integers(1, 40)
)


@given(st.lists(STEPS, max_size=80))
def test_bytes_and_references_add_up_under_any_traffic(steps):
    pool, held = EmbeddingPool(100), dict.fromkeys(range(8), 0)
    for action, i, size in steps:
        if action == "put":
            try:
                pool.put(name(i), features(size))
            except PoolFull:
                assert size > pool.available_bytes
        elif action == "acquire":
            held[i] += pool.acquire(name(i)) is not None
        elif action == "release" and held[i]:
            pool.release(name(i))
            held[i] -= 1
        elif action == "clear":
            pool.clear()
        pool.check_integrity()
        assert all(name(j) in pool for j, count in held.items() if count)


def test_what_comes_and_goes_is_noted_for_whoever_keeps_a_copy():
    pool, copy = EmbeddingPool(8), set()
    pool.noted = lambda digest, came: copy.add(digest) if came else copy.remove(digest)
    for digest in (b"a", b"b", b"b", b"c"):
        pool.put(digest, torch.zeros(1))
        assert copy == pool.digests
    assert copy == {b"b", b"c"}
    pool.clear()
    assert copy == pool.digests == frozenset()
