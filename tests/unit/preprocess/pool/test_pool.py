"""Worker processes: they answer as one thread does, and whatever happens to one costs one item."""

import asyncio
import functools
import gc
import os
import signal
import time
import weakref

import numpy as np
import pytest
from helpers.media_files import clip_file, picture_file
from helpers.pool_watch import at_work, eyes, gone, pids, settle, state, ticks, until
from helpers.preparing import chat_of, picture, prepared
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest, MediaError, Overloaded, WorkersDead
from mmserve.core.messages import ImagePart, TextPart, VideoPart
from mmserve.preprocess.pool import keeper as keeping
from mmserve.preprocess.pool.pool import WorkerPool
from mmserve.preprocess.threads import ThreadWorkers

NOISE = np.random.default_rng(0).integers(0, 256, (100, 160, 3), np.uint8)


@functools.cache
def large_file(side=3000):
    """A picture that takes a while to decode and little to send."""
    return picture_file(Image.linear_gradient("L").resize((side, side)).convert("RGB"), "JPEG")


@functools.cache
def blank_file(side=3000):
    return picture_file(Image.new("RGB", (side, side)))


def long_clip(frames=400, **fields):
    """Long work, between the frames of which a worker can be spoken to; a few megabytes to send."""
    return VideoPart(pictures=(blank_file(),) * frames, **fields)


def slow_picture():
    """Some tenths of a second of work, so that its worker is seen at it."""
    return ImagePart(data=large_file())


# ---------------------------------------------------------------- it answers as one thread does

PARTS = {
    "file": ImagePart(data=picture_file(NOISE)),
    "turned": ImagePart(
        data=picture_file(
            NOISE, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
        )
    ),
    "large": ImagePart(data=large_file(1500), max_pixels=200_000),
    "transparent": ImagePart(data=picture_file(np.dstack([NOISE, NOISE[..., :1]])), background=(255, 0, 0)),
    "array": ImagePart(pixels=NOISE[::2, ::-1]),
    "clip": VideoPart(data=clip_file(9)),
    "clip with rate": VideoPart(data=clip_file(12), fps=5.0),
    "frames": VideoPart(frames=np.stack([NOISE, NOISE[::-1], NOISE]), timestamps=(0.0, 0.5, 1.5)),
    "pictures": VideoPart(pictures=(picture_file(NOISE), picture_file(NOISE[::-1]))),
}


@pytest.mark.parametrize("name", PARTS)
async def test_a_part_becomes_what_it_becomes_in_one_thread(pool, processor, name):
    threads = ThreadWorkers(processor, max_preparing=1)
    ours, plain = await pool.see(PARTS[name]), await threads.see(PARTS[name])
    await threads.close()
    assert (ours.kind, ours.grid, ours.digests, ours.seen) == (
        plain.kind,
        plain.grid,
        plain.digests,
        plain.seen,
    )
    assert (ours.timestamps, ours.seconds_per_grid) == (plain.timestamps, plain.seconds_per_grid)
    for a, b in zip(ours.pixels, plain.pixels, strict=True):
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
        assert not a.flags.writeable
    assert {"queue", "resize", "digest"} <= ours.stages.keys()


async def test_a_request_becomes_what_it_becomes_in_one_thread(pool, processor):
    chat = chat_of(TextPart("Hello"), *PARTS.values(), TextPart("what is this \ud800"), priority=3)
    ours, plain = await prepared(pool, chat), processor.prepare(chat)
    for field in ("token_ids", "radix_keys", "positions"):
        a, b = getattr(ours.request, field), getattr(plain.request, field)
        assert (a.dtype, a.tolist(), a.flags.writeable) == (b.dtype, b.tolist(), False)
    assert ours.request.position_delta == plain.request.position_delta
    assert [(i.span, i.digest, i.timestamp) for i in ours.request.items] == [
        (i.span, i.digest, i.timestamp) for i in plain.request.items
    ]
    assert ours.seen == plain.seen
    assert ours.request.priority == 3
    assert {"queue", "template", "tokenise", "layout"} <= ours.stages.keys()


async def test_turns_that_were_met_before_are_not_tokenised_again(pool):
    hits = pool.stats()["token_pieces_hits"]
    for words in ("Hello", "Hello"):
        await pool.assemble(chat_of(TextPart(words)), [])
    assert pool.stats()["token_pieces_hits"] > hits


async def test_errors_are_those_of_one_thread(pool, processor):
    for part in (
        ImagePart(data=b"junk", param="p"),
        VideoPart(data=b"junk", param="p"),
        VideoPart(param="p"),
    ):
        with pytest.raises(MediaError) as plain:
            processor.see(part)
        with pytest.raises(MediaError) as ours:
            await pool.see(part)
        assert ours.value.body() == plain.value.body()
    with pytest.raises(InvalidRequest, match="empty"):
        await pool.assemble(chat_of(prompt=""), [])


async def test_pixels_stay_while_anyone_sees_them_and_no_longer(pool):
    medium = await pool.see(picture(1))
    kept = medium.pixels[0][0, 5:]
    content = kept.copy()
    del medium
    for seed in range(20):
        await pool.see(picture(seed))
    assert (kept == content).all()
    assert pool.stats()["arena_used_bytes"] > 0


async def test_callers_may_stand_in_any_loop(pool):
    for _ in range(2):
        medium = await asyncio.to_thread(asyncio.run, pool.see(picture(1)))
        assert medium.kind == "image"


# ---------------------------------------------------------------- together


async def test_eight_pictures_of_one_request_use_all_workers(pool):
    before = {worker.pid: ticks(worker.pid) for worker in pool._eyes.workers}
    await prepared(pool, chat_of(*[slow_picture()] * 8))
    assert all(ticks(pid) > used for pid, used in before.items())


async def test_one_picture_does_not_wait_for_the_many_of_another_request(single):
    order = []

    async def see(name, part):
        await single.see(part, request=name)
        order.append(name)

    many = [see("many", slow_picture()) for _ in range(5)]  # none is done before all wait
    await asyncio.gather(*many, see("one", picture(1)))
    assert order.index("one") <= 2


async def test_words_do_not_wait_for_a_long_clip(single):
    watching = asyncio.create_task(single.see(long_clip()))
    await at_work(*eyes(single))
    await single.assemble(chat_of(TextPart("Hello")), [])
    assert not watching.done()
    watching.cancel()


async def test_a_full_queue_refuses_and_says_so(single):
    tasks = [asyncio.create_task(single.see(long_clip(), request=f"{i}")) for i in range(4)]
    await until(lambda: single.stats()["preparing"] == 4)
    with pytest.raises(Overloaded, match="4 requests") as caught:
        await single.see(picture(1), request="one more", deadline=time.monotonic() + 100)
    assert caught.value.status == 503
    more = asyncio.create_task(single.see(picture(1), request="3"))
    await until(lambda: single.stats()["jobs_queued"] == 4)
    for task in (*tasks, more):
        task.cancel()


async def test_cancelling_gives_places_and_memory_back_and_costs_no_worker(single):
    workers = pids(single)
    lost = single.stats()["workers_lost"]
    running = asyncio.create_task(single.see(long_clip()))
    await at_work(*eyes(single))
    waiting = [asyncio.create_task(single.see(picture(i), request=f"{i}")) for i in range(3)]
    await until(lambda: single.stats()["jobs_queued"] == 3)
    assert single.stats()["arena_used_bytes"] > 0
    for task in waiting:
        task.cancel()
    await until(lambda: single.stats()["jobs_queued"] == 0)
    running.cancel()
    await asyncio.to_thread(settle, single)
    assert pids(single) == workers
    assert single.stats()["workers_lost"] == lost
    assert (await single.see(picture(1))).kind == "image"


async def test_nothing_remembers_the_file_of_a_caller_who_left(single):
    running = asyncio.create_task(single.see(long_clip()))
    await at_work(*eyes(single))
    waiting = asyncio.create_task(single.see(picture(1), request="r"))
    await until(lambda: single.stats()["jobs_queued"] == 1)
    [job] = map(weakref.ref, single._eyes.queue)
    waiting.cancel()
    del waiting
    await until(lambda: gc.collect() * 0 + (job() is None), seconds=20)  # the timer had 60
    running.cancel()


# ---------------------------------------------------------------- time


async def test_one_that_waits_too_long_is_told_to_try_later(single):
    watching = asyncio.create_task(single.see(long_clip(), request="clip"))
    await at_work(*eyes(single))
    with pytest.raises(Overloaded, match="waited") as caught:
        await single.see(picture(1), request="r", deadline=time.monotonic() + 0.2)
    assert caught.value.status == 503
    watching.cancel()


async def test_one_that_takes_too_long_is_given_up_by_its_worker(single):
    workers = pids(single)
    with pytest.raises(MediaError, match="longer than") as caught:
        await single.see(long_clip(param="the clip"), deadline=time.monotonic() + 2)
    assert (caught.value.code, caught.value.status, caught.value.param) == ("media_timeout", 400, "the clip")
    await single.see(picture(1))
    assert single.stats()["jobs_overdue"] > 0
    assert pids(single) == workers


async def test_a_worker_that_hangs_is_replaced(single):
    watching = asyncio.create_task(single.see(long_clip(param="p"), deadline=time.monotonic() + 3))
    pid = await at_work(*eyes(single))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(MediaError, match="longer than") as caught:
        await watching
    assert (caught.value.code, caught.value.param) == ("media_timeout", "p")
    assert (await single.see(picture(1))).kind == "image"
    assert gone(pid)


# ---------------------------------------------------------------- loss


async def test_a_killed_worker_costs_the_item_it_was_at_and_no_other(pool):
    lost = pool.stats()["workers_lost"]
    watching = asyncio.create_task(pool.see(long_clip(param="the clip")))
    pid = await at_work(*eyes(pool))
    others = [asyncio.create_task(pool.see(picture(i), request=f"{i}")) for i in range(8)]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(MediaError, match="SIGKILL") as caught:
        await watching
    assert (caught.value.code, caught.value.status, caught.value.param) == ("worker_lost", 400, "the clip")
    assert all(medium.kind == "image" for medium in await asyncio.gather(*others))
    await until(lambda: len(pool._eyes.workers) == 2 and pid not in pids(pool))
    assert pool.stats()["workers_lost"] == lost + 1


async def test_a_worker_killed_while_idle_costs_nothing(single):
    (worker,) = single._eyes.workers
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: worker not in single._eyes.workers)
    assert (await single.see(picture(1))).kind == "image"


async def test_words_go_on_after_their_worker_was_killed(single):
    (worker,) = single._writer.workers
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: worker not in single._writer.workers)
    assert (await single.assemble(chat_of(TextPart("Hello")), [])).request.num_tokens > 0


async def test_a_file_that_takes_too_much_memory_fails_alone(single):
    greedy = picture_file(Image.new("RGB", (9000, 9000)), "JPEG")
    answers = await asyncio.gather(
        single.see(ImagePart(data=greedy, param="p"), request="a"),
        single.see(picture(1), request="b"),
        return_exceptions=True,
    )
    assert isinstance(answers[0], MediaError)
    assert (answers[0].code, answers[0].param) == ("too_much_memory", "p")
    assert "256 MiB" in answers[0].message
    assert answers[1].kind == "image"


async def test_a_worker_grown_old_is_replaced_between_two_jobs(single, monkeypatch):
    monkeypatch.setattr(keeping, "MOST_JOBS", 2)
    single._keeper._ring()
    before = pids(single)
    os.kill(before[0], signal.SIGKILL)  # its successor counts by the new number
    await until(lambda: pids(single) and before[0] not in pids(single) and single._eyes.workers)
    recycled, successor = single.stats()["workers_recycled"], single._eyes.workers[0].pid
    for i in range(3):
        assert (await single.see(picture(i))).kind == "image"
    assert single.stats()["workers_recycled"] > recycled
    assert single._eyes.workers[0].pid != successor


# ---------------------------------------------------------------- memory for pixels


async def test_what_can_never_fit_into_the_arena_is_refused_with_the_limit(single):
    frames = np.zeros((60, 512, 512, 3), np.uint8)
    with pytest.raises(MediaError, match=r"at most 32 are allowed \(arena_mib\)") as caught:
        await single.see(VideoPart(frames=frames, param="p"))
    assert (caught.value.code, caught.value.param) == ("media_too_large", "p")


async def test_beginners_wait_while_the_arena_is_full(single):
    large = ImagePart(pixels=np.zeros((64, 64, 3), np.uint8), min_pixels=1600 * 1600)
    held = []
    while single.stats()["arena_used_bytes"] <= 24 << 20:
        held.append(await single.see(large, request="holder"))
    waiting = asyncio.create_task(single.see(picture(1), request="beginner"))
    await until(lambda: single.stats()["jobs_queued"] == 1)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    held.clear()
    assert (await waiting).kind == "image"


# ---------------------------------------------------------------- processes


async def test_no_worker_loads_torch(pool):
    await prepared(pool, chat_of(picture(1), VideoPart(data=clip_file(4)), TextPart("x")))
    for pid in pids(pool):
        with open(f"/proc/{pid}/maps") as maps:
            loaded = maps.read()
        assert "numpy" in loaded
        assert "torch" not in loaded


async def test_workers_use_one_thread_each(pool):
    await prepared(pool, chat_of(slow_picture(), VideoPart(data=clip_file(30)), TextPart("x")))
    assert [len(os.listdir(f"/proc/{pid}/task")) for pid in pids(pool)] == [1, 1, 1]


async def test_ctrl_c_and_a_sigterm_to_the_group_are_not_for_workers(single):
    before = pids(single)
    for pid in before:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    await prepared(single, chat_of(picture(1), TextPart("x")))
    assert pids(single) == before
    assert all(state(pid) in ("R", "S", "D") for pid in before)


async def test_closing_fails_what_is_under_way_and_leaves_no_process(spec):
    pool = WorkerPool(spec, MediaOptions(workers=1))
    pool.wait_ready()
    assert pool.ready
    tasks = [asyncio.create_task(pool.see(part)) for part in (long_clip(), picture(1))]
    await at_work(*eyes(pool))
    processes = pids(pool)
    await pool.close()
    await pool.close()
    assert gone(*processes)
    assert not pool.ready
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(answer, WorkersDead)
    with pytest.raises(WorkersDead, match="closed"):
        await pool.see(picture(1))


async def test_workers_that_cannot_start_are_an_error_and_no_endless_loop(spec, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    pool = WorkerPool(spec, MediaOptions(workers=1))
    waiting = asyncio.create_task(pool.see(picture(1)))
    with pytest.raises(WorkersDead, match="do not start"):
        await asyncio.to_thread(pool.wait_ready)
    with pytest.raises(WorkersDead, match="exit status 1"):
        await waiting
    with pytest.raises(WorkersDead):
        await pool.see(picture(1))
    assert not pool.ready
    monkeypatch.undo()
    await until(lambda: pool.ready)
    assert (await pool.see(picture(1))).kind == "image"
    await pool.close()


async def test_a_glance_is_what_one_thread_sees(pool, processor):
    data = picture_file(np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8), "JPEG")
    luma = await pool.glance(data, request="camera")
    assert luma.tolist() == processor.glance(data).tolist()


async def test_a_glance_at_junk_costs_nobody_else_anything(pool, processor):
    data = picture_file(np.zeros((90, 120, 3), np.uint8))
    glances = [pool.glance(b"junk" if i % 2 else data, request=f"camera {i % 3}") for i in range(12)]
    found = await asyncio.gather(*glances, return_exceptions=True)
    assert all(isinstance(luma, MediaError) for luma in found[1::2])
    assert all(luma.shape == (48, 64) for luma in found[::2])


async def test_glances_wear_a_worker_out_more_slowly(single, monkeypatch):
    monkeypatch.setattr(keeping, "MOST_JOBS", 2)
    recycled = single.stats()["workers_recycled"]
    data = picture_file(np.zeros((9, 12, 3), np.uint8))
    for _ in range(40):
        await single.glance(data, request="camera")
    assert single.stats()["workers_recycled"] <= recycled + 1, "one that had done other jobs before"
