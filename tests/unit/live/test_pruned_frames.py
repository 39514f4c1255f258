"""Sessions whose frames leave out what they repeat: what stands in the context shows what the camera does."""

import asyncio
import time

import numpy as np
import pytest
from helpers.live_host import FakeHost, said, until
from helpers.media_files import picture_file

from mmserve.core.errors import MediaError
from mmserve.core.messages import Message, TextPart
from mmserve.live.frame import Frame
from mmserve.live.policy import SessionPolicy
from mmserve.live.window import Limits
from mmserve.preprocess.pruning import VISIBLE

SIDE = 32  # of a cell
GRID = (3, 4)
CELLS = GRID[0] * GRID[1]


@pytest.fixture
async def opened(host):
    sessions = []

    def opening(**fields):
        sessions.append(host.open(**{"pruning_rate": 0.95, "memory": 2, **fields}))
        return sessions[-1]

    yield opening
    for session in sessions:
        await session.close()


def image(values, size=GRID):
    """Flat cells of these luminances."""
    grey = np.asarray(values, np.uint8).reshape(size).repeat(SIDE, 0).repeat(SIDE, 1)
    return np.repeat(grey[..., None], 3, 2)


async def show(session, *shown, size=GRID, raw=False):
    """Frames that no gate holds back, one after the other."""
    for values in shown:
        before = sum(session.stats()["frames"].values())
        now = time.monotonic()
        pixels = image(values, size)
        held = {"pixels": pixels} if raw else {"data": picture_file(pixels)}
        session.put(Frame(seq=before, captured=now, received=now, gated="change", **held))
        await until(lambda before=before: sum(session.stats()["frames"].values()) > before)


def frames(session):
    return [s for s in session.context.trunk.segments if s.kind == "frame"]


def kept(session):
    """How many cells of each frame in the context are tokens."""
    return [CELLS if s.items[0].kept is None else len(s.items[0].kept) for s in frames(session)]


def flat(value=100, **others):
    """All cells alike, but for those that are named as ``_3=200``."""
    values = np.full(CELLS, value)
    for name, other in others.items():
        values[int(name[1:])] = other
    return values


def seen_by_the_model(session, host):
    """Each cell as the context's frames show it last, made again of what is kept of them; None where none
    shows it."""
    last = [None] * CELLS
    for segment in frames(session):
        (source,) = segment.sources
        medium = host.processor.see(source.part)
        assert medium.digests == source.digests == tuple(item.digest for item in segment.items)
        cells = medium.pixels[0][0].reshape(GRID[0], SIDE, GRID[1], SIDE, 3).mean((1, 3, 4)).reshape(-1)
        own = range(CELLS) if segment.items[0].kept is None else segment.items[0].kept
        for cell in own:
            last[cell] = cells[cell]
    return last


def shows(session, host, values):
    return all(
        own is not None and abs(own - value) < VISIBLE
        for own, value in zip(seen_by_the_model(session, host), values, strict=True)
    )


# ---------------------------------------------------------------- what is left out


async def test_a_frame_is_its_changes(host, opened):
    session = opened()
    await show(session, flat(), flat(_5=200), flat(_5=200, _0=30), flat(255))
    assert kept(session) == [CELLS, 1, 1, CELLS]
    assert [list(s.items[0].kept) for s in frames(session)[1:3]] == [[5], [0]]
    assert session.stats()["pruned_tokens"] == 2 * (CELLS - 1)
    assert shows(session, host, flat(255))


async def test_without_a_rate_all_frames_are_whole(host, opened):
    session = opened(pruning_rate=0.0)
    await show(session, flat(), flat(_5=200), flat(_5=200, _0=30))
    assert kept(session) == [CELLS] * 3
    assert session._said is None
    assert session.stats()["pruned_tokens"] == 0


async def test_at_most_the_share_of_a_frame_is_left_out(opened):
    session = opened(pruning_rate=0.5)
    await show(session, flat(), *[flat(_5=200)] * 3)
    assert kept(session) == [CELLS, 6, 6, 6]


async def test_a_drift_is_said_against_what_the_context_shows(host, opened):
    session = opened()
    for value in range(100, 150, 3):
        await show(session, flat(value))
        assert shows(session, host, flat(value))
    assert sum(kept(session)) < 0.6 * CELLS * len(kept(session))


@pytest.mark.parametrize("pair", [False, True])
async def test_pairs_and_raw_pixels_are_pruned_alike(opened, pair):
    session = opened(pair=pair)
    each = 2 if pair else 1
    for number, values in enumerate((flat(), flat(_5=200), flat(_5=200))):
        for _ in range(each):
            now = time.monotonic()
            pixels = image(values)
            session.put(Frame(seq=0, captured=now, received=now, gated="change", pixels=pixels))
            await until(lambda: not len(session._watcher.mailbox))
            await asyncio.sleep(0.01)
        await until(lambda n=number: session.stats()["frames"]["kept"] == each * (n + 1))
    assert kept(session) == [CELLS, 1, 1]


async def test_the_prompt_is_that_of_the_window_sent_again(host, opened):
    """What is kept as source gives the same items, in any request."""
    from mmserve.core.messages import ChatInput, SamplingParams

    session = opened()
    await show(session, flat(), flat(_5=200), flat(_5=200, _7=20))
    await said(session.ask("what"))
    (asked,) = host.asked
    parts = tuple(source.part for source in session.context.trunk.sources() if source.part)
    chat = ChatInput(
        request_id="again",
        messages=(Message("user", (*parts, TextPart("what"))),),
        sampling=SamplingParams(),
    )
    again = host.processor.prepare(chat).request
    for name in ("token_ids", "radix_keys", "positions"):
        assert getattr(again, name).tolist() == getattr(asked, name).tolist(), name
    assert again.position_delta == asked.position_delta
    assert [i.digest for i in again.items] == [i.digest for i in asked.items]


async def test_pixels_that_are_asked_for_again_are_those_of_the_same_mask(host, opened):
    session = opened()
    await show(session, flat(), flat(_5=200), flat(_5=200, _7=20))
    wanted = frozenset(item.digest for item in session.context.trunk.items())
    found = await session.pixels_again(session.context.trunk.sources())(wanted)
    assert found.keys() == wanted


# ---------------------------------------------------------------- frames that are whole


async def test_a_change_of_size_is_a_whole_frame(opened):
    session = opened()
    await show(session, flat(), flat(_5=200))
    await show(session, flat(), size=(4, 3))
    await show(session, flat(_1=9), size=(4, 3))
    assert kept(session) == [CELLS, 1, CELLS, 1]


async def test_after_a_frame_that_failed_the_next_is_whole(host, opened):
    session = opened()
    await show(session, flat(), flat(_5=200))
    now = time.monotonic()
    session.put(Frame(seq=9, data=b"junk", captured=now, received=now, gated="change"))
    await until(lambda: session.stats()["frames"]["decode_error"] == 1)
    await show(session, flat(_5=200), flat(_5=200, _1=0))
    assert kept(session) == [CELLS, 1, CELLS, 1]


async def test_after_a_change_of_policy_the_next_is_whole(host, opened):
    session = opened()
    await show(session, flat(), flat(_5=200))
    await session.update(policy=SessionPolicy.of({"memory": 1}, session.policy))
    await show(session, flat(_5=200), flat(_5=20))
    assert kept(session) == [CELLS, 1, CELLS, 1]


async def test_after_new_instructions_the_next_is_whole_and_what_was_seen_is_laid_out_as_before(host, opened):
    session = opened()
    await show(session, flat(), flat(_5=200))
    before = list(session.context.trunk.stretches())
    await session.update(instructions="Look at two pictures")
    after = list(session.context.trunk.stretches())
    for (_, one), (_, other) in zip(before, after, strict=True):
        assert one.positions.tolist() == other.positions.tolist()
        assert one.advance == other.advance
    await show(session, flat(_5=200), flat(_5=20))
    assert kept(session) == [CELLS, 1, CELLS, 1]
    assert shows(session, host, flat(_5=20))


async def test_a_frame_pruned_against_what_left_the_context_meanwhile_is_seen_once_more(host, opened):
    """The policy changes while a worker is at it."""
    session = opened()
    await show(session, flat(), flat(_5=200))
    see, parts = host.see, []

    async def slow(part):
        parts.append(part)
        medium = await see(part)
        if len(parts) == 1:
            await session.update(instructions="Look at two pictures")
        return medium

    host.see = slow
    await show(session, flat(_5=200, _1=0))
    assert [part.reference is None for part in parts] == [False, True]
    assert kept(session) == [CELLS, 1, CELLS]


# ---------------------------------------------------------------- forgetting


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_is_dropped_the_context_shows_what_the_camera_does(spec, seed):
    """Frames change in a few cells or in all, drift, and are asked about; windows are small."""
    chance = np.random.default_rng(seed)
    tokens = [4096, 260][seed % 2]
    host = FakeHost(spec, limits=Limits(tokens=tokens, positions=[4096, 400][seed % 3 == 0]))
    session = host.open(
        pruning_rate=[0.95, 0.5][seed % 2],
        window_items=int(chance.integers(2, 9)),
        retention=float(chance.uniform(0.2, 0.9)),
        memory=1,
    )
    values = flat()
    for step in range(40):
        if chance.random() < 0.1:
            values = chance.integers(0, 256, CELLS)
        elif chance.random() < 0.5:
            values = np.clip(values + chance.integers(-4, 5, CELLS), 0, 255)
        values[chance.integers(CELLS)] = chance.integers(0, 256)
        await show(session, values)
        assert shows(session, host, values), step
        assert len(frames(session)) <= session.policy.window_items
        if chance.random() < 0.15:
            await said(session.ask("what"))
            if session._said is not None:  # else it was dropped, and the next frame is whole
                assert shows(session, host, values), step
    assert session.stats()["drops"] > 2
    assert session.stats()["pruned_tokens"] > 40
    await session.close()


async def test_where_even_a_chain_does_not_fit_the_next_frame_is_whole_and_comes_soon(spec):
    """A long answer takes the room of the key frame."""
    host = FakeHost(spec, limits=Limits(tokens=160, positions=4096))
    session = host.open(pruning_rate=0.9, memory=4)
    await show(session, flat(), flat(_5=200), flat(_5=200, _1=0))
    await session.tell(Message("user", (TextPart("Hello world " * 50),)))
    assert session._said is None
    assert session._watcher.gate._sent is None
    await show(session, flat(_5=200, _1=0))
    assert frames(session)[-1].key
    await session.close()


async def test_what_is_kept_to_make_pixels_again_counts_the_masks(host, opened):
    session = opened()
    await show(session, flat(), flat(_5=200))
    whole, pruned = (source.nbytes for source in session.context.trunk.sources())
    assert pruned >= frames(session)[1].items[0].kept.nbytes
    assert whole > 0
    assert all(s.sources[0].part.reference is None for s in frames(session)), (
        "what it was pruned against goes"
    )


async def test_a_failing_worker_ends_the_chain_and_no_session(host, opened):
    session = opened()
    await show(session, flat(), flat(_5=200))
    see = host.see

    async def broken(part):
        raise MediaError("no")

    host.see = broken
    await show(session, flat(_5=201))
    host.see = see
    await show(session, flat(_5=202))
    assert kept(session) == [CELLS, 1, CELLS]
