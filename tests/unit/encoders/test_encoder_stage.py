"""The encoder stage: what is encoded, when, and in which batches."""

import numpy as np
import pytest
import torch
from msgspec import structs

from mmserve.core.errors import MediaError, MMServeError
from mmserve.core.messages import VisionItem
from mmserve.encoders.pool import EmbeddingPool
from mmserve.encoders.stage import EncoderStage

HIDDEN = 8


class FakeEncoder:
    """Features that hold the item's first pixel; remembers its batches."""

    def __init__(self):
        self.batches = []

    def parts(self, pixels, grids):
        """One part an item."""
        self.batches.append([int(p[0, 0, 0, 0]) for p in pixels])
        counts = [h * w // 4 for h, w in grids]
        values = [
            torch.full((n, 1, HIDDEN), float(p[0, 0, 0, 0])) for n, p in zip(counts, pixels, strict=True)
        ]
        yield from (1.0 for _ in pixels)
        return list(torch.cat(values).split(counts))


def item(i, grid=(4, 4)):
    pixels = np.full((1, 8, 8, 3), i, np.uint8)
    pixels.flags.writeable = False
    return VisionItem(digest=bytes([i]) * 32, kind="image", grid=grid, span=(0, 4), pixels=pixels)


def planned(s, *items):
    """First pixels of the next batch."""
    return [int(i.pixels[0, 0, 0, 0]) for i in s.next_batch(items)]


def stage(budget=8, capacity=1 << 20):
    return EncoderStage(FakeEncoder(), budget, EmbeddingPool(capacity), merge_size=2, token_bytes=4 * HIDDEN)


def test_same_digest_is_encoded_once():
    s = stage()
    s.encode([item(1), item(2), item(1)])
    s.encode([item(2)])
    assert s.encoder.batches == [[1, 2]]
    assert s.encoded_items == 2
    assert s.encoded_tokens == 8


def test_batches_keep_to_the_token_budget():
    s = stage(budget=8)
    s.encode([item(i) for i in range(1, 6)])
    assert s.encoder.batches == [[1, 2], [3, 4], [5]]


def test_larger_item_runs_alone():
    s = stage(budget=8)
    assert planned(s, item(1, (8, 8)), item(2)) == [1]
    assert planned(s, item(2), item(1, (8, 8))) == [2]


def test_batch_keeps_to_what_the_pool_can_hold():
    s = stage(budget=100, capacity=10 * 4 * HIDDEN)
    assert planned(s, *(item(i) for i in range(4))) == [0, 1]
    s.encode_batch([item(0), item(1)])
    assert planned(s, item(2), item(3), item(0)) == [2], "item 0 is wanted and stays"
    s.pool.acquire(item(0).digest)
    s.pool.acquire(item(1).digest)
    assert planned(s, item(2)) == []


def test_pool_entries_do_not_keep_the_batch_alive():
    s = stage()
    s.encode_batch([item(1), item(2)])
    found = s.pool.acquire(item(2).digest)
    assert found.untyped_storage().nbytes() == found.nbytes
    assert (found == 2).all()


def test_item_without_pixels_that_is_not_in_the_pool_is_an_error():
    lost = VisionItem(digest=b"x" * 32, kind="image", grid=(4, 4), span=(0, 4), pixels=None)
    with pytest.raises(MMServeError, match="has no pixels"):
        stage().encode_batch([lost])


def test_item_that_can_never_fit_is_refused_at_the_door():
    with pytest.raises(MediaError, match="send a smaller picture"):
        stage(capacity=64).check(item(1))


class PlacesEncoder(FakeEncoder):
    """Features that hold the place of their cell, in both levels."""

    def parts(self, pixels, grids):
        yield from (1.0 for _ in pixels)
        return [torch.arange(h * w // 4.0).reshape(-1, 1, 1).expand(-1, 2, HIDDEN) for h, w in grids]


def test_of_a_pruned_item_the_kept_rows_of_every_level_are_kept():
    kept = np.array([1, 2, 5], np.int32)
    part = structs.replace(item(1, (4, 8)), kept=kept)
    size = 2 * 4 * HIDDEN
    s = EncoderStage(PlacesEncoder(), 100, EmbeddingPool(1 << 20), merge_size=2, token_bytes=size)
    s.begin([part])
    assert s.pool.reserved_bytes == 3 * size
    s.advance(float("inf"))
    found = s.pool.acquire(part.digest)
    assert found.shape == (3, 2, HIDDEN)
    assert found[:, 0, 0].tolist() == found[:, 1, 3].tolist() == [1.0, 2.0, 5.0]
    assert found.untyped_storage().nbytes() == found.nbytes == 3 * size
    s.check_integrity()


def test_a_pruned_item_costs_the_encoder_its_whole_grid_and_the_pool_what_is_kept():
    pruned = [structs.replace(item(i, (4, 8)), kept=np.array([0], np.int32)) for i in range(3)]
    assert [len(batch) for batch in (stage(budget=16).next_batch(pruned), stage(8).next_batch(pruned))] == [
        2,
        1,
    ]
    small = stage(budget=100, capacity=2 * 4 * HIDDEN)
    small.check(pruned[0])
    assert len(small.next_batch(pruned)) == 2
    with pytest.raises(MediaError):
        small.check(item(1, (4, 8)))


# ---------------------------------------------------------------- slices


def test_a_batch_is_computed_in_slices_and_kept_at_the_end():
    s = stage()
    s.begin([item(1), item(2)])
    assert [i.digest for i in s.items] == [item(1).digest, item(2).digest]
    assert s.advance(1.0) == 1.0
    assert item(1).digest not in s.pool, "the whole batch or nothing"
    s.check_integrity()
    assert s.advance(5.0) == 1.0
    assert s.items == ()
    assert s.encoded_items == 2
    assert s.slices == 2
    assert (s.pool.acquire(item(2).digest) == 2).all()
    s.check_integrity()


def test_the_room_of_a_batch_is_kept_while_it_is_in_work():
    s = stage(capacity=8 * 4 * HIDDEN)
    s.encode([item(7), item(8)])
    s.pool.acquire(item(8).digest)
    s.begin([item(1)])
    assert item(7).digest not in s.pool, "its room was made at once"
    assert s.pool.available_bytes == 0
    s.check_integrity()
    s.advance(5.0)
    assert item(1).digest in s.pool
    assert item(8).digest in s.pool


def test_what_is_about_to_be_used_is_not_dropped_for_a_new_batch():
    s = stage(capacity=8 * 4 * HIDDEN)
    s.encode([item(7), item(8)])
    assert s.next_batch([item(1)], spare=[item(7).digest, item(8).digest]) == []
    s.begin(s.next_batch([item(1)], spare=[item(7).digest]))
    assert item(7).digest in s.pool
    assert item(8).digest not in s.pool


def test_a_dropped_batch_leaves_nothing_behind():
    s = stage()
    s.begin([item(1), item(2)])
    s.advance(1.0)
    s.drop()
    s.check_integrity()
    assert (s.items, len(s.pool), s.pool.used_bytes, s.dropped_batches) == ((), 0, 0, 1)
    s.encode([item(1)])
    assert item(1).digest in s.pool


def test_a_slice_that_fails_ends_its_batch_and_gives_back_its_room():
    s = stage()

    def parts(pixels, grids):
        yield 1.0
        raise RuntimeError("out of luck")

    s.encoder.parts = parts
    s.begin([item(1)])
    s.advance(1.0)
    with pytest.raises(RuntimeError, match="out of luck"):
        s.advance(1.0)
    assert s.items == ()
    s.check_integrity()
    assert s.pool.used_bytes == 0
