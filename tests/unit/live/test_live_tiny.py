"""Sessions of the bundled model: it names what a camera shows, whatever has been dropped meanwhile."""

import asyncio
import threading
import time

import pytest
from helpers.live_host import said, until

from mmserve.core.config import Config
from mmserve.core.messages import ChatInput, Message, SamplingParams, TextPart
from mmserve.live.events import Spoken
from mmserve.live.frame import Frame
from mmserve.live.policy import SessionPolicy
from mmserve.models.tiny.samples import SAMPLES
from mmserve.service import Service

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
WHAT = "What is this?"
NAMES = {"cat": "A cat.", "apples": "An apple.", "village": "A sun.", "circle-rabbit": "A red circle."}


@pytest.fixture(scope="module", params=["load", "start"], ids=["one process", "processes"])
def service(request):
    """With everything in this process, and with workers, engine and detokenizer as processes."""
    workers = 0 if request.param == "load" else 1
    service = getattr(Service, request.param)(
        Config.of(kv_cache_mib=32, workers=workers, threads=2, page_size=4)
    )
    yield service
    service.close()


@pytest.fixture
async def opened(service):
    sessions = []

    async def opening(**policy):
        policy = SessionPolicy(**{"fps": 30.0, "max_pixels": 128 * 128, **policy})
        sessions.append(await service.live.open(policy, sampling=GREEDY))
        return sessions[-1]

    yield opening
    for session in sessions:
        await session.close()


def sample(name, seq=0, gated=None):
    now = time.monotonic()
    data = (SAMPLES / f"{name}.jpg").read_bytes()
    return Frame(seq=seq, data=data, captured=now, received=now, gated=gated)


async def show(session, *names, gated=None):
    """Frames that are all kept; the engine has computed them when this returns."""
    for name in names:
        kept = session.stats()["frames"]["kept"]
        session.put(sample(name, kept, gated))
        await until(lambda kept=kept: session.stats()["frames"]["kept"] > kept)
        await until(
            lambda: (
                session._warmed
                and session._warmed[:2] == (session.context.trunk, session.context.trunk.version)
            )
        )


async def resent(service, session, question):
    """What is answered when the window is sent as a request of its own, computed from the beginning."""
    parts = tuple(source.part for source in session.context.trunk.sources())
    chat = ChatInput(
        request_id=f"resent {time.monotonic()}",
        messages=(Message("user", (*parts, TextPart(question))),),
        sampling=GREEDY,
        cache_salt=f"apart {time.monotonic()}",
    )
    outputs = [output async for output in service.generate(chat)]
    return [t for o in outputs for t in o.token_ids], outputs[-1].usage


async def answer(session, question=WHAT, **fields):
    pieces, text = await said(session.ask(question, **fields))
    return pieces, text


@pytest.mark.parametrize("name", ["cat", "apples"])
async def test_it_names_what_it_sees(opened, name):
    session = await opened()
    await show(session, name)
    pieces, text = await answer(session)
    assert text == NAMES[name]
    assert pieces[-1].usage.video_tokens == 16 if name == "cat" else True
    assert pieces[0].frame_seq == 0
    assert 0 < pieces[0].age_ms < 60_000


async def test_it_names_the_new_thing_after_a_change(opened):
    session = await opened(memory=0, window_items=1)
    for name in ("cat", "apples", "cat", "apples"):
        await show(session, name)
        assert (await answer(session))[1] == NAMES[name]


async def test_watching_ahead_answers_as_sending_the_window_again_does(service, opened):
    session = await opened(memory=0)
    for names in (["cat"], ["village"], ["circle-rabbit", "apples"], ["hello", "cat"]):
        await show(session, *names)
        for question in (WHAT, "Describe this image.", "How many things are there?"):
            pieces, _ = await answer(session, question)
            ids = [t for piece in pieces if piece.output for t in piece.output.token_ids]
            again, usage = await resent(service, session, question)
            assert ids == again
            assert pieces[-1].usage.prompt_tokens == usage.prompt_tokens
            assert usage.cached_tokens == 0
            fresh = usage.prompt_tokens - pieces[-1].usage.cached_tokens
            assert fresh < 40, "the question pays for its own tokens only"


@pytest.mark.parametrize("name", ["cat", "apples"])
async def test_it_names_what_it_sees_in_frames_of_one_token(opened, name):
    """No gate holds back what shows nothing new; the window is dropped again and again."""
    session = await opened(memory=0, pruning_rate=0.95, window_items=6, retention=0.5)
    for _ in range(16):
        await show(session, name, gated="change")
        assert (await answer(session))[1] == NAMES[name]
    stats = session.stats()
    assert stats["pruned_tokens"] > 8 * 8
    assert stats["drops"] > 1
    assert next(s for s in session.context.trunk.segments if s.kind == "frame").key


async def test_pruned_frames_are_answered_as_sending_the_window_again_is(service, opened):
    session = await opened(memory=0, pruning_rate=0.9)
    for names in (["cat", "cat"], ["village", "village"], ["cat"]):
        await show(session, *names, gated="change")
        pieces, _ = await answer(session, "Describe this image.")
        ids = [t for piece in pieces if piece.output for t in piece.output.token_ids]
        again, usage = await resent(service, session, "Describe this image.")
        assert ids == again
        assert pieces[-1].usage.prompt_tokens == usage.prompt_tokens
        assert pieces[-1].usage.video_tokens == usage.video_tokens
    assert session.stats()["pruned_tokens"] > 20


async def test_a_static_scene_costs_neither_encoder_nor_prompt(service, opened):
    session = await opened()
    await show(session, "cat")
    before = service.stats()
    for i in range(30):
        session.put(sample("cat", 10 + i))
        await session.settled()
    after = service.stats()
    assert after["encoded_items"] == before["encoded_items"]
    assert after["warmed"] == before["warmed"]
    assert session.stats()["frames"]["kept"] == 1
    assert (await answer(session))[0][-1].age_ms < 5000


async def test_what_was_said_before_is_there_later(opened):
    session = await opened(memory=4)
    await show(session, "cat")
    await answer(session)
    await show(session, "apples")
    assert (await answer(session))[1] == "An apple."
    kinds = [segment.kind for segment in session.context.trunk.segments]
    assert kinds == ["head", "frame", "exchange", "frame", "exchange"]


async def test_after_drops_and_rebases_it_still_names_what_it_sees(service, opened, monkeypatch):
    """Past ten windows and past a position limit that was made small, in constant memory."""
    monkeypatch.setattr(service.live, "_max_position", 400)
    session = await opened(memory=1, window_items=2, retention=0.5)
    sizes, used = [], []
    for i in range(48):
        name = list(NAMES)[i % len(NAMES)]
        await show(session, name)
        assert (await answer(session))[1] == NAMES[name]
        stats = session.stats()
        assert stats["next_position"] <= 400
        sizes.append(stats["context_tokens"])
        used.append(stats["kept_bytes"])
    stats = session.stats()
    assert stats["drops"] > 10
    assert stats["rebases"] > 0
    assert stats["carried_tokens"] > 0
    assert max(sizes[24:]) <= max(sizes[:24]) + 4, "but for the digits of the frames' seconds"
    assert max(used[24:]) <= max(used[:24])
    assert await idle(service)


async def idle(service, seconds=10.0):
    """Whether the engine comes to rest with every page free or cached."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = service.stats()
        if not stats["running"] and stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages"]:
            return True
        await asyncio.sleep(0.02)
    return False


def forget_all(service):
    """Have the engine evict whatever it can."""
    engine, done = service._engine.thread._engine, threading.Event()

    def evict():
        memory = engine.scheduler.memory
        memory.pages.release(memory.prefixes.clear())
        engine.stage.pool.clear()
        done.set()

    service._engine.thread.call(evict)
    assert done.wait(10)


@pytest.mark.parametrize("frames", [1, 3])
async def test_what_the_engine_forgot_is_made_again_from_what_is_kept(service, opened, frames):
    """Keys and values of a session may be evicted, and features too; those of pruned frames, as well."""
    if not hasattr(service._engine, "thread"):
        pytest.skip("an engine of this process alone can be told to forget")
    session = await opened(memory=0, pruning_rate=0.9)
    await show(session, *["cat"] * frames, gated="change")
    assert (session.stats()["pruned_tokens"] > 0) is (frames > 1)
    before = service.stats()["pixel_requests"]
    forget_all(service)
    pieces, text = await answer(session)
    assert text == NAMES["cat"]
    assert pieces[-1].usage.cached_tokens == 0
    assert service.stats()["pixel_requests"] == before + 1


async def test_a_newer_question_cuts_an_older_one_within_a_step(service, opened):
    session = await opened()
    await show(session, "village")
    long = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
    first = asyncio.create_task(answer(session, "Describe this image.", sampling=long))
    await until(lambda: service.stats()["running"] == 1)
    await asyncio.sleep(0.05)
    _, text = await answer(session)
    pieces, _ = await first
    assert pieces[-1].finish_reason == "cut"
    assert text
    assert await idle(service)


async def test_cancel_ends_an_answer_and_frees_what_it_held(service, opened):
    session = await opened()
    await show(session, "cat")
    long = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
    asking = asyncio.create_task(answer(session, sampling=long))
    await until(lambda: service.stats()["running"] == 1)
    assert session.cancel()
    assert (await asking)[0][-1].finish_reason == "cancelled"
    assert await idle(service)


async def spoken(events):
    """What the next answer that comes by itself says, to its end."""
    text = ""
    async for event in events:
        if isinstance(event, Spoken):
            text += event.piece.text
            if event.piece.finish_reason is not None:
                break
    return text


async def test_a_change_is_answered_by_itself(opened):
    session = await opened(trigger="change", question=WHAT, window_items=1, memory=0)
    events = session.events()
    for number, (name, text) in enumerate({"cat": "A cat.", "apples": "An apple."}.items(), start=1):
        session.put(sample(name, number))
        assert await spoken(events) == text
