"""Pictures beside the steps of answers: nobody waits for them, and nothing is read before it is there."""

import gc
import weakref

import numpy as np
import pytest
import torch
from helpers.engine_requests import make_engine, prepared, tokens
from helpers.late_device import LateDevice

from mmserve.core.messages import VisionItem
from mmserve.encoders.pool import EmbeddingPool
from mmserve.encoders.stage import EncoderStage
from mmserve.engine.making import STALL_FACTOR

HIDDEN = 8
TOKENS = 4


class LateEncoder:
    """Computes when its stream comes to it: features are the first pixel of their item."""

    def __init__(self, device, parts=1):
        self.device, self.count = device, parts

    def parts(self, pixels, grids):
        for _ in range(self.count - 1):
            self.device.here.enqueue(lambda: None)
            yield 1.0
        features = [torch.zeros(TOKENS, 1, HIDDEN) for _ in pixels]
        both = list(zip(features, pixels, strict=True))
        self.device.here.enqueue(lambda: [f.fill_(p.flatten()[0]) for f, p in both])
        yield 1.0
        return features


def item(i, kept=None):
    pixels = np.full((1, 8, 8, 3), i, np.uint8)
    return VisionItem(
        digest=bytes([i]) * 32, kind="image", grid=(4, 4), span=(0, 4), pixels=pixels, kept=kept
    )


def made(parts=1, paced=True):
    device = LateDevice()
    encoder, pool = LateEncoder(device, parts), EmbeddingPool(1 << 20)
    stage = EncoderStage(encoder, 8, pool, merge_size=2, token_bytes=4 * HIDDEN, device=device, paced=paced)
    lane = next(s for s in device.streams if "priority 0" in s.name and s is not device.here)
    return stage, device, lane


def test_features_enter_the_pool_when_the_device_has_them():
    stage, device, lane = made()
    stage.begin([item(3)])
    stage.advance(float("inf"))
    stage.collect()
    assert stage.busy
    assert item(3).digest not in stage.pool
    assert stage.items, "it counts as being encoded all the while"
    lane.run()
    stage.collect()
    assert not stage.items
    features = stage.pool.acquire(item(3).digest)
    assert (features == 3).all()
    assert not device.here.queue, "all of it stood in the other stream"


def test_one_slice_is_under_way_at_a_time_where_they_are_paced():
    stage, _, lane = made(parts=3)
    stage.begin([item(3)])
    slices = 0
    while stage.items:
        assert not stage.busy
        stage.advance(1.0)
        assert stage.busy or slices == 3, "the last one finds that nothing is left"
        lane.run()
        slices += 1
        assert [work for work, _ in stage.collect()] == [1.0 if slices < 4 else 0.0]
    assert slices == 4
    assert item(3).digest in stage.pool


def test_slices_that_need_no_pace_are_launched_one_behind_the_other():
    """Each takes little of the host's time, and the device need not wait for the next."""
    stage, _, lane = made(parts=3, paced=False)
    stage.begin([item(3)])
    for _ in range(3):
        assert not stage.busy
        stage.advance(float("inf"), seconds=0.0)
        stage.collect()
        assert stage.items
    stage.advance(float("inf"), seconds=0.0)
    assert stage.busy, "all is launched"
    assert lane.done == 0
    lane.run()
    stage.collect()
    assert item(3).digest in stage.pool


def test_the_steps_wait_before_memory_of_features_that_they_read_is_given_away():
    stage, device, lane = made()
    stage.begin([item(3)])
    stage.advance(float("inf"))
    lane.run()
    steps = device.stream(-1)
    with steps.use():
        stage.collect()
    features = stage.pool.acquire(item(3).digest)
    assert device.kept == [(features.data_ptr(), steps.name)]


@pytest.mark.parametrize("dropped", [True, False])
def test_pixels_are_held_until_they_were_copied(dropped):
    """They lie in memory that the preprocessing gives to others."""
    stage, _, lane = made()
    shown = item(3)
    held = weakref.ref(shown.pixels)
    stage.begin([shown])
    del shown
    if dropped:
        stage.drop()
    else:
        stage.advance(float("inf"))
    stage.collect()
    gc.collect()
    assert held() is not None
    lane.run()
    stage.collect()
    gc.collect()
    assert held() is None


def test_waiting_is_for_the_slice_and_for_nothing_else():
    stage, device, lane = made()
    stage.begin([item(3)])
    stage.advance(float("inf"))
    device.here.enqueue(lambda: None)
    stage.wait()
    assert lane.done == len(lane.queue)
    assert device.here.done == 0


def test_rows_that_are_kept_are_cut_out_in_the_same_stream():
    stage, device, _ = made()
    encoder = stage.encoder

    def rows(pixels, grids):
        features = torch.arange(TOKENS).float().view(TOKENS, 1, 1).repeat(1, 1, HIDDEN)
        device.here.run()
        yield 1.0
        return [features]

    encoder.parts = rows
    stage.encode([item(3, kept=(1, 3))])
    assert stage.pool.acquire(item(3).digest)[:, 0, 0].tolist() == [1.0, 3.0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from helpers.qwen_pairs import Pair

    return Pair("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


class LatePictures(LateDevice):
    """Only what the encoder's stream has to do is late."""

    def copy(self, target, source):
        target.copy_(source)


def test_answers_go_on_while_the_device_is_at_a_picture(pair, monkeypatch):
    monkeypatch.setattr("mmserve.engine.engine.device_for", lambda device, eager=False: LatePictures())
    monkeypatch.setitem(STALL_FACTOR, "cpu", None)
    monkeypatch.setattr("mmserve.engine.engine.LAUNCH_S", float("inf"))
    plain = pair.prompt(9)
    shown = pair.prompt(5, ("image", 4, 6), 7)
    engine = make_engine(pair, overlap="on")
    lane = engine.stage._lane.stream
    monkeypatch.setattr(type(engine.stage._lane), "launch", held_up(type(engine.stage._lane).launch))
    engine.submit(prepared(pair, plain, "text", max_tokens=30))
    outputs = engine.step() + engine.step()
    engine.submit(prepared(pair, shown, "picture", max_tokens=3))
    for _ in range(10):
        outputs += engine.step()
        engine.check_integrity()
    assert engine.stage.busy
    assert len(tokens([o for o in outputs if o.request_id == "text"])) == 11, "one a step"
    assert not [o for o in outputs if o.request_id == "picture"]
    lane.run()
    for _ in range(3):
        outputs += engine.step()
    assert [o for o in outputs if o.request_id == "picture"]
    while engine.has_work:
        outputs += engine.step()
    engine.check_integrity()
    reference = make_engine(pair)
    reference.submit(prepared(pair, shown, "picture", max_tokens=3))
    again = []
    while reference.has_work:
        again += reference.step()
    assert tokens([o for o in outputs if o.request_id == "picture"]) == tokens(again)


def held_up(launch):
    """Something stands in the stream until it is run."""

    def launched(lane, part):
        lane.stream.enqueue(lambda: None)
        return launch(lane, part)

    return launched


def test_an_engine_with_nothing_else_to_do_waits_for_the_picture(pair, monkeypatch):
    monkeypatch.setattr("mmserve.engine.engine.device_for", lambda device, eager=False: LatePictures())
    monkeypatch.setitem(STALL_FACTOR, "cpu", None)
    monkeypatch.setattr("mmserve.engine.engine.LAUNCH_S", float("inf"))
    engine = make_engine(pair, overlap="on")
    monkeypatch.setattr(type(engine.stage._lane), "launch", held_up(type(engine.stage._lane).launch))
    engine.submit(prepared(pair, pair.prompt(5, ("image", 4, 6), 7), "r", max_tokens=2))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps < 8, "it does not go round and round"
