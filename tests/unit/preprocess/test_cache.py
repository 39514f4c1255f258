"""Early answers: which parts are the same, and how much is kept of them."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.arena import Arena
from mmserve.core.messages import ImagePart, Seen, VideoPart
from mmserve.preprocess.cache import EarlyAnswers, part_digest
from mmserve.preprocess.media import Medium


def medium(name, items=1, nbytes=300):
    digests = tuple(bytes([name, i]) * 16 for i in range(items))
    pixels = tuple(np.full((1, nbytes // 3, 1, 3), name, np.uint8) for _ in range(items))
    seen = Seen("image", "PNG", (8, 8), (8, 8), (4, 4), 4)
    return Medium("image", (4, 4), pixels, digests, seen)


def test_every_field_but_the_place_makes_another_part():
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    parts = [
        ImagePart(data=b"x"),
        ImagePart(data=b"y"),
        ImagePart(data=b"x", min_pixels=1),
        ImagePart(data=b"x", max_pixels=1),
        ImagePart(data=b"x", background=(0, 0, 0)),
        ImagePart(pixels=frames[0]),
        ImagePart(pixels=frames[0].reshape(2, 8, 3)),
        VideoPart(data=b"x"),
        VideoPart(data=b"x", fps=1.0),
        VideoPart(data=b"x", num_frames=1),
        VideoPart(data=b"x", min_pixels=1),
        VideoPart(data=b"x", timestamps=(0.0, 1.0)),
        VideoPart(frames=frames),
        VideoPart(frames=frames, timestamps=(0.0, 1.0)),
        VideoPart(frames=frames, timestamps=(0.0, 2.0)),
        VideoPart(frames=frames.reshape(4, 2, 4, 3)),
        VideoPart(pictures=(b"x",)),
        VideoPart(pictures=(b"xy", b"z")),
        VideoPart(pictures=(b"x", b"yz")),
        VideoPart(pictures=(b"x", b"y", b"z")),
    ]
    names = [part_digest(part) for part in parts]
    assert len(set(names)) == len(parts)
    assert {len(name) for name in names} == {32}


def test_no_field_of_a_part_is_forgotten():
    """Also not one that is added later: whatever a field holds, another value makes another digest."""
    for kind in (ImagePart, VideoPart):
        plain = part_digest(kind())
        for name in kind.__struct_fields__:
            assert (part_digest(kind(**{name: "other"})) == plain) is (name == "param"), name


def test_the_same_content_elsewhere_is_the_same_part():
    here, there = (ImagePart(data=b"x", max_pixels=9, param=f"messages[{i}]") for i in range(2))
    assert part_digest(here) == part_digest(there)
    array = np.arange(96, dtype=np.uint8).reshape(4, 8, 3)
    assert part_digest(ImagePart(pixels=array)) == part_digest(ImagePart(pixels=np.asfortranarray(array)))


def test_an_answer_has_no_pixels_and_they_are_kept_apart():
    answers, sent = EarlyAnswers(1 << 20, 1 << 20), medium(1, items=2)
    answers.keep(b"k", sent, pixels=True)
    found = answers.find(b"k")
    assert found.pixels == (None, None)
    assert (found.digests, found.seen) == (sent.digests, sent.seen)
    assert [p is q for p, q in zip(answers.pixels(sent.digests), sent.pixels, strict=True)] == [True, True]
    answers.drop_pixels(sent.digests[:1])
    assert answers.pixels(sent.digests) is None, "all of a medium or none"
    assert answers.stats()["pixel_cache_bytes"] == 0
    assert answers.find(b"k") is not None


def test_the_bound_is_of_the_memory_that_pixels_hold():
    """Items of one clip share an allocation: what is left of it, or equal to others in it, holds it whole."""
    arena, answers = Arena(1 << 20), EarlyAnswers(1 << 20, 1 << 18)
    for name in range(30):
        block = arena.allocate(1 << 16)
        pixels = tuple(arena.view(block, (1, 1 << 12, 1, 3), i * (1 << 14)) for i in range(4))
        arena.release(block)
        digests = (bytes([name, 0]) * 16,) * 3 + (bytes([name, 1]) * 16,)  # it stands still, then moves
        if name % 2:
            digests = tuple(bytes([name, i]) * 16 for i in range(4))
        answers.keep(bytes([name]), replace(medium(name), pixels=pixels, digests=digests), pixels=True)
        answers.drop_pixels(digests[:-1] if name % 3 == 0 else ())
        del pixels
        assert arena.used <= 6 * (1 << 16)  # 256 KiB of pixels, in blocks a quarter of which is spare
    assert answers.stats()["pixel_cache_bytes"] > 0


def test_pixels_of_what_the_encoder_has_are_not_kept():
    answers = EarlyAnswers(1 << 20, 1 << 20)
    answers.keep(b"k", medium(1), pixels=False)
    assert answers.find(b"k") is not None
    assert answers.stats()["pixel_cache_bytes"] == 0


def test_answers_count_what_their_books_take():
    answers = EarlyAnswers(3000, 0)
    for name in range(3):
        answers.keep(bytes([name]), medium(name), pixels=True)
    assert [name for name in range(3) if answers.find(bytes([name]))] == [1, 2]
    answers.keep(b"long clip", medium(9, items=40), pixels=True)
    assert answers.find(b"long clip") is None, "larger than the whole bound"
    assert answers.find(bytes([2])) is not None
    assert answers.stats()["pixel_cache_bytes"] == 0


def test_hits_and_misses_are_counted():
    answers = EarlyAnswers(1 << 20, 1 << 20)
    answers.find(b"k")
    answers.keep(b"k", medium(1), pixels=True)
    answers.find(b"k")
    answers.pixels(medium(1).digests)
    answers.pixels(medium(2).digests)
    stats = answers.stats()
    assert (stats["early_answers_hits"], stats["early_answers_misses"]) == (1, 1)
    assert (stats["pixel_cache_hits"], stats["pixel_cache_misses"]) == (1, 1)


ACTIONS = ["keep", "bare", "find", "pixels", "drop"]
steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 6), st.integers(1, 4)),
    max_size=60,
)


@given(steps)
def test_bytes_are_those_of_what_is_kept_within_the_bounds(steps):
    answers, last = EarlyAnswers(5000, 1500), {}
    for action, name, items in steps:
        key = bytes([name])
        if action in ("keep", "bare"):
            last[key] = medium(name, items, nbytes=300 * (1 + name % 2))
            answers.keep(key, last[key], pixels=action == "keep")
        elif action == "find":
            found = answers.find(key)
            assert found is None or found.digests == last[key].digests
        elif action == "pixels":
            for array in answers.pixels(medium(name, items).digests) or ():
                assert (array == name).all()
        else:
            answers.drop_pixels(medium(name, items).digests)
        stats = answers.stats()
        assert stats["early_answers_bytes"] <= 5000
        kept = [p.nbytes for m in answers._pixels._kept.values() for p in m.pixels]
        assert stats["pixel_cache_bytes"] == sum(kept) <= 1500
