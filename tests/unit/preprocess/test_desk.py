"""The desk: what is answered early, what is decoded, and for whom."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest
from helpers.media_files import clip_file, picture_file

from mmserve.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    MediaError,
    MMServeError,
    Overloaded,
)
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart, VideoPart
from mmserve.core.metrics import Metrics
from mmserve.preprocess import desk as desk_module
from mmserve.preprocess.cache import EarlyAnswers
from mmserve.preprocess.desk import PrepareDesk
from mmserve.preprocess.threads import ThreadWorkers


class CountedWorkers(ThreadWorkers):
    """Workers that count what they were given, and wait while the gate is shut."""

    def __init__(self, processor):
        super().__init__(processor, max_preparing=64)
        self.seen, self.given_up = [], 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def see(self, part, **options):
        self.seen.append(part)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return await super().see(part, **options)


class Encoder:
    """What the encoder holds."""

    def __init__(self):
        self.digests = set()

    def holds(self, digest):
        return digest in self.digests

    def take(self, prepared):
        self.digests |= {item.digest for item in prepared.request.items}


@pytest.fixture
async def workers(processor):
    workers = CountedWorkers(processor)
    yield workers
    workers.gate.set()
    await workers.close()


@pytest.fixture
def encoder():
    return Encoder()


@pytest.fixture
def desk(workers, encoder):
    answers = EarlyAnswers(1 << 20, 1 << 24)
    return PrepareDesk(workers, answers, encoder.holds, Metrics(dict), max_items=4, max_text_chars=1000)


def picture(seed=0, size=64):
    return picture_file(np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8))


def chat(*parts, name="r", deadline=None):
    message = Message("user", (*parts, TextPart("what?")))
    return ChatInput(request_id=name, messages=(message,), sampling=SamplingParams(), deadline=deadline)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0.001)


def same(prepared, plain):
    assert prepared.request.token_ids.tolist() == plain.request.token_ids.tolist()
    assert prepared.request.positions.tolist() == plain.request.positions.tolist()
    assert prepared.request.radix_keys.tolist() == plain.request.radix_keys.tolist()
    assert [i.digest for i in prepared.request.items] == [i.digest for i in plain.request.items]


async def test_a_new_request_is_as_the_processor_makes_it(desk, processor):
    asked = chat(ImagePart(data=picture(1)), VideoPart(data=clip_file(6)))
    prepared, plain = await desk.prepare(asked), processor.prepare(asked)
    same(prepared, plain)
    for ours, theirs in zip(prepared.request.items, plain.request.items, strict=True):
        assert np.array_equal(ours.pixels, theirs.pixels)
    assert [s.cached for s in prepared.seen] == [False, False]


async def test_too_many_words_are_refused_before_anybody_reads_them(desk, workers):
    with pytest.raises(ContextLengthExceeded) as refusal:
        await desk.prepare(chat(TextPart("x" * 990), TextPart("y" * 6)))
    assert (refusal.value.param, refusal.value.status) == ("messages", 400)
    assert "1001 characters" in refusal.value.message
    raw = ChatInput(request_id="r", messages=(), prompt="z" * 1001, sampling=SamplingParams())
    with pytest.raises(ContextLengthExceeded) as refusal:
        await desk.prepare(raw)
    assert refusal.value.param == "prompt"
    assert (await desk.prepare(chat(TextPart("x" * 900)))).request.num_tokens > 0


async def test_what_the_encoder_holds_is_not_decoded_again_and_comes_without_pixels(desk, workers, encoder):
    asked = chat(ImagePart(data=picture()), VideoPart(data=clip_file(6)))
    first = await desk.prepare(asked)
    encoder.take(first)
    desk.encoded(i.digest for i in first.request.items)
    assert desk.stats()["pixel_cache_bytes"] == 0
    again = await desk.prepare(asked)
    same(again, first)
    assert [i.pixels for i in again.request.items] == [None] * len(first.request.items)
    assert [s.cached for s in again.seen] == [True, True]
    assert len(workers.seen) == 2


async def test_until_the_encoder_has_them_pixels_come_from_memory(desk, workers):
    first = await desk.prepare(chat(ImagePart(data=picture())))
    again = await desk.prepare(chat(ImagePart(data=picture())))
    assert again.request.items[0].pixels is first.request.items[0].pixels
    assert len(workers.seen) == 1
    assert desk.stats()["pixel_cache_hits"] == 1


async def test_pixels_that_are_gone_are_decoded_again_for_who_asks_for_all(desk, workers, encoder):
    asked = chat(ImagePart(data=picture()), VideoPart(data=clip_file(6)))
    first = await desk.prepare(asked)
    encoder.take(first)
    desk.encoded(i.digest for i in first.request.items)
    pixels = await desk.pixels(asked, first.digests, frozenset(i.digest for i in first.request.items))
    assert pixels.keys() == {i.digest for i in first.request.items}
    for item in first.request.items:
        assert np.array_equal(pixels[item.digest], item.pixels)
    assert len(workers.seen) == 4
    assert desk.stats()["pixel_cache_bytes"] == 0, "not kept, since the encoder has them"


async def test_for_one_item_that_is_gone_only_what_shows_it_is_decoded_again(desk, workers, encoder):
    asked = chat(*(ImagePart(data=picture(seed)) for seed in range(3)), VideoPart(data=clip_file(6)))
    first = await desk.prepare(asked)
    encoder.take(first)
    items = first.request.items
    desk.encoded(i.digest for i in items)
    assert [own for digests in first.digests for own in digests] == [i.digest for i in items]
    pixels = await desk.pixels(asked, first.digests, frozenset({items[1].digest}))
    assert pixels.keys() == {items[1].digest}
    assert np.array_equal(pixels[items[1].digest], items[1].pixels)
    assert len(workers.seen) == 4 + 1
    assert (await desk.pixels(asked, first.digests, frozenset({items[-1].digest}))).keys() == {
        i.digest for i in items[3:]
    }, "a clip is decoded as one"
    assert len(workers.seen) == 4 + 2


async def test_what_the_encoder_has_dropped_is_decoded_again(desk, workers, encoder):
    asked = chat(ImagePart(data=picture()))
    first = await desk.prepare(asked)
    encoder.take(first)
    desk.encoded(i.digest for i in first.request.items)
    encoder.digests.clear()
    again = await desk.prepare(asked)
    assert np.array_equal(again.request.items[0].pixels, first.request.items[0].pixels)
    assert again.seen[0].cached is False
    assert len(workers.seen) == 2


async def test_other_bytes_with_the_same_pixels_need_no_pixels_either(desk, workers, encoder):
    array = np.random.default_rng(3).integers(0, 256, (64, 64, 3), np.uint8)
    encoder.take(await desk.prepare(chat(ImagePart(data=picture_file(array)))))
    other = await desk.prepare(chat(ImagePart(data=picture_file(array, "BMP"))))
    assert other.request.items[0].pixels is None
    assert len(workers.seen) == 2


async def test_the_same_bytes_with_other_options_are_another_item(desk, workers):
    data = picture(size=128)
    small = await desk.prepare(chat(ImagePart(data=data, max_pixels=64 * 64)))
    large = await desk.prepare(chat(ImagePart(data=data, max_pixels=128 * 128)))
    assert small.request.items[0].digest != large.request.items[0].digest
    assert len(workers.seen) == 2


async def test_two_who_bring_the_same_new_picture_cause_one_decode(desk, workers):
    workers.gate.clear()
    tasks = [
        asyncio.create_task(desk.prepare(chat(ImagePart(data=picture()), name=str(i)))) for i in range(3)
    ]
    await settle()
    workers.gate.set()
    prepared = await asyncio.gather(*tasks)
    assert len(workers.seen) == 1
    assert len({id(p.request.items[0].pixels) for p in prepared}) == 1
    assert [p.seen[0].cached for p in prepared] == [False, True, True]
    assert desk.stats()["media_shared"] == 2


async def test_who_came_first_may_leave_and_the_other_still_gets_it(desk, workers):
    workers.gate.clear()
    first, second = (asyncio.create_task(desk.prepare(chat(ImagePart(data=picture())))) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    workers.gate.set()
    assert (await second).request.items[0].pixels is not None
    assert (len(workers.seen), workers.given_up) == (1, 0)


async def test_when_all_have_left_the_decode_is_given_up(desk, workers):
    workers.gate.clear()
    tasks = [asyncio.create_task(desk.prepare(chat(ImagePart(data=picture())))) for _ in range(2)]
    await settle()
    for task in tasks:
        task.cancel()
    await settle()
    assert workers.given_up == 1
    assert desk.stats()["media_in_flight"] == 0


async def test_an_error_names_each_caller_s_own_part_and_is_not_kept(desk, workers):
    workers.gate.clear()
    parts = [ImagePart(data=b"junk", param=f"messages[{i}]") for i in range(2)]
    tasks = [asyncio.create_task(desk.prepare(chat(part))) for part in parts]
    await settle()
    workers.gate.set()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, MediaError) for error in errors)
    assert [error.param for error in errors] == ["messages[0]", "messages[1]"]
    assert len(workers.seen) == 1
    with pytest.raises(MediaError):
        await desk.prepare(chat(parts[0]))
    assert len(workers.seen) == 2
    assert desk.stats()["early_answers"] == 0


async def test_a_deadline_is_its_request_s_alone(desk, workers):
    workers.gate.clear()
    hasty = chat(ImagePart(data=picture(), param="p"), deadline=time.monotonic() + 0.05)
    patient = asyncio.create_task(desk.prepare(chat(ImagePart(data=picture()))))
    await settle()
    with pytest.raises(DeadlineExceeded, match=r"^p: ") as caught:
        await desk.prepare(hasty)
    assert (caught.value.status, caught.value.param) == (504, "deadline_ms")
    assert desk.expired == 1
    workers.gate.set()
    assert (await patient).request.items
    assert len(workers.seen) == 1


@pytest.mark.parametrize("error", [Overloaded("waited"), InvalidRequest("took", code="media_timeout")])
async def test_a_prompt_that_is_not_written_by_the_deadline_is_no_fault_of_the_caller(desk, workers, error):
    async def late(chat, media):
        raise error

    workers.assemble = late
    with pytest.raises(DeadlineExceeded):
        await desk.prepare(chat(deadline=time.monotonic()))
    for soon_enough in (None, time.monotonic() + 60):
        with pytest.raises(type(error)) as caught:
            await desk.prepare(chat(deadline=soon_enough))
        assert caught.value is error
    assert desk.expired == 1


async def test_what_is_wrong_with_a_part_is_told_however_late(desk):
    with pytest.raises(InvalidRequest) as caught:
        await desk.prepare(chat(*(ImagePart(data=b"junk") for _ in range(5)), deadline=0.0))
    assert not isinstance(caught.value, DeadlineExceeded)


async def test_one_bad_part_gives_up_its_siblings(desk, workers):
    workers.gate.clear()
    asked = chat(ImagePart(data=b"junk", param="p"), ImagePart(data=picture(), min_pixels=-1))
    task = asyncio.create_task(desk.prepare(asked))
    await settle()
    workers.gate.set()
    with pytest.raises(MediaError):
        await task
    await settle()
    assert desk.stats()["media_in_flight"] == 0


async def test_too_many_parts_are_refused_before_any_work(desk, workers):
    with pytest.raises(MediaError, match="there are 5 pictures and clips; at most 4"):
        await desk.prepare(chat(*[ImagePart(data=picture())] * 5))
    assert workers.seen == []


async def test_the_same_picture_twice_in_one_request_is_decoded_once(desk, workers):
    prepared = await desk.prepare(chat(*[ImagePart(data=picture())] * 2))
    assert len(prepared.request.items) == 2
    assert len(workers.seen) == 1


async def test_large_bytes_are_not_read_on_the_event_loop(desk, monkeypatch):
    threads, digest = [], desk_module.part_digest

    def noting(part):
        threads.append(threading.current_thread() is threading.main_thread())
        return digest(part)

    monkeypatch.setattr(desk_module, "part_digest", noting)
    small, large = np.zeros((64, 64, 3), np.uint8), np.zeros((640, 640, 3), np.uint8)
    await desk.look(ImagePart(pixels=small))
    await desk.look(ImagePart(pixels=large))
    await desk.look(VideoPart(frames=np.zeros((100, 64, 64, 3), np.uint8)))
    assert threads == [True, False, False]


async def test_stages_are_observed_once_for_what_is_done_once(desk, workers):
    asked = chat(ImagePart(data=picture()))
    await desk.prepare(asked)
    first = desk.metrics.render().decode()
    await desk.prepare(asked)
    told = desk.metrics.render().decode()
    for text, decodes, templates in ((first, 1, 1), (told, 1, 2)):
        assert f'mmserve_stage_seconds_count{{stage="decode"}} {decodes}.0' in text
        assert f'mmserve_stage_seconds_count{{stage="resize"}} {decodes}.0' in text
        assert f'mmserve_stage_seconds_count{{stage="template"}} {templates}.0' in text
    assert 'mmserve_media_total{kind="image",outcome="decoded"} 1.0' in told
    assert 'mmserve_media_total{kind="image",outcome="cached"} 1.0' in told


async def test_an_error_keeps_nothing_of_its_request_alive(desk, workers):
    """Also not until the cycle collector comes by: the bytes of bad requests would pile up."""
    array = np.zeros((64, 64, 3), np.uint8)
    alive = weakref.ref(array)
    gc.collect()
    gc.disable()
    try:
        await refused(desk, ImagePart(pixels=array, min_pixels=-1))
        workers.seen.clear()
        del array
        await settle()
        assert alive() is None
    finally:
        gc.enable()


async def refused(desk, part):
    with suppress(MMServeError):
        await desk.prepare(chat(part))


async def test_a_frame_that_goes_on_from_another_takes_no_room_among_early_answers(desk, workers):
    """It brings what that one was, and nobody brings the same again; a session has thousands of them."""
    frames = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8)
    first = await desk.look(VideoPart(frames=frames, video_pruning_rate=0.5))
    kept = desk.stats()["early_answers"], desk.stats()["pixel_cache_bytes"]
    for shade in range(3):
        medium = await desk.look(
            VideoPart(frames=frames ^ np.uint8(shade), video_pruning_rate=0.5, reference=first.reference)
        )
        assert medium.pixels[0] is not None
    assert (desk.stats()["early_answers"], desk.stats()["pixel_cache_bytes"]) == kept
    assert kept[0] == 1
