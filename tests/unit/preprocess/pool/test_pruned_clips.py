"""Workers choose the cells of a clip as one thread does, and what they are told of earlier ones arrives."""

import numpy as np
import pytest

from mmserve.core.messages import VideoPart

SCENE = np.random.default_rng(1).integers(0, 256, (128, 160, 3), np.uint8)


def frames(*places):
    """The scene with a white square at each of ``places``."""
    shown = np.repeat(SCENE[None], len(places), 0)
    for image, place in zip(shown, places, strict=True):
        image[32 * place : 32 * place + 30, :40] = 255
    return shown


def same(ours, plain):
    assert ours.digests == plain.digests
    assert ours.seen == plain.seen
    assert len(ours.kept) == len(plain.kept)
    pairs = [*zip(ours.kept, plain.kept, strict=True), (ours.reference, plain.reference)]
    for one, other in pairs:
        assert (one is None) is (other is None)
        assert one is None or (one.dtype, one.tolist()) == (other.dtype, other.tolist())


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9])
async def test_a_clip_loses_the_cells_that_it_loses_in_one_thread(pool, processor, rate):
    part = VideoPart(frames=frames(0, 0, 1, 1, 1, 2, 2, 2), video_pruning_rate=rate)
    ours, plain = await pool.see(part), processor.see(part)
    same(ours, plain)
    assert bool(plain.seen.dropped_tokens) is (rate > 0)
    del ours


async def test_frames_go_on_from_one_to_the_next(pool, processor):
    reference = None
    for step in range(4):
        part = VideoPart(frames=frames(step, step), video_pruning_rate=0.8, reference=reference)
        ours, plain = await pool.see(part), processor.see(part)
        same(ours, plain)
        assert (plain.seen.dropped_tokens > 0) is (step > 0)
        again = VideoPart(frames=frames(step, step), kept=plain.kept[0] if plain.kept else None)
        assert (await pool.see(again)).digests == plain.digests
        reference = plain.reference
        del ours
