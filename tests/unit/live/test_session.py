"""A session over a service that does as the tests say."""

import asyncio
import threading
import time

import numpy as np
import pytest
from helpers.live_host import FakeHost, frame, said, scene, until

from mmserve.core.errors import DeadlineExceeded, EngineDead, InvalidRequest, MMServeError, Overloaded
from mmserve.core.messages import Message, SamplingParams, TextPart
from mmserve.live.policy import SessionPolicy
from mmserve.live.session import Closed, Failed, FrameAck, Spoken, Triggered
from mmserve.live.window import Limits


@pytest.fixture
async def opened(host):
    """Sessions of ``host``, closed at the end."""
    sessions = []

    def opening(**fields):
        sessions.append(host.open(**fields))
        return sessions[-1]

    yield opening
    for session in sessions:
        await session.close()


def fates(session):
    return {fate: count for fate, count in session.stats()["frames"].items() if count}


async def show(session, *places, seq=0):
    """Frames one after the other, each when the one before has been dealt with."""
    for i, place in enumerate(places):
        before = sum(session.stats()["frames"].values())
        session.put(frame(place, seq + i))
        await session.settled()
        await until(lambda before=before: sum(session.stats()["frames"].values()) > before)


# ---------------------------------------------------------------- watching


async def test_a_kept_frame_is_computed_ahead_and_a_question_brings_its_own_tokens_only(host, opened):
    session = opened()
    await show(session, 1)
    await until(lambda: len(host.warms) == 2)
    head, first = host.warms
    assert head.num_tokens < first.num_tokens
    pieces, text = await said(session.ask("what"))
    (asked,) = host.asked
    assert text == "it is black"
    assert pieces[-1].finish_reason == "stop"
    assert asked.token_ids[: first.num_tokens].tolist() == first.token_ids.tolist()
    assert asked.num_tokens < first.num_tokens + 20


async def test_frames_that_show_nothing_new_cost_no_look_and_no_prompt(host, opened):
    session = opened()
    await show(session, 1)
    await until(lambda: len(host.warms) == 2)
    await show(session, *[1] * 10, seq=1)
    assert (host.seen, len(host.warms)) == (1, 2)
    assert fates(session) == {"kept": 1, "unchanged": 10}
    assert session.known.seq == 10


async def test_every_frame_ends_once_and_is_told(host, opened):
    session = opened()
    events = session.events()
    await show(session, 1, 1, 2)
    session.put(frame(1, 7, age=60.0))
    session.put(frame(seq=8, data=b"junk"))
    session.put(frame(seq=9, data=b"x" * (2 << 20)))
    await until(lambda: sum(fates(session).values()) == 6)
    await session.close()
    session.put(frame(1, 10))
    found = [event async for event in events]
    acks = {e.seq: e.reason for e in found if isinstance(e, FrameAck)}
    assert [acks[i] for i in (0, 1, 2, 9)] == ["kept", "unchanged", "kept", "too_big"]
    assert acks[7] in ("late", "superseded", "rate")
    assert acks[8] in ("decode_error", "superseded", "rate")
    assert isinstance(found[-1], Closed)
    assert fates(session)["closed"] == 1


async def test_junk_is_a_decode_error_and_the_next_frame_is_seen(opened):
    session = opened()
    session.put(frame(seq=1, data=b"junk"))
    await until(lambda: fates(session) == {"decode_error": 1})
    await show(session, 2)
    assert fates(session) == {"decode_error": 1, "kept": 1}


async def test_old_frames_are_late(opened):
    session = opened(max_frame_age_ms=100)
    session.put(frame(1, age=1.0))
    await until(lambda: fates(session) == {"late": 1})


async def test_a_slow_model_makes_frames_supersede_each_other_and_never_queue(host, opened):
    session = opened(window_items=4)
    host.warm_s = 0.2
    ages = []
    events = session.events(10_000)
    for i in range(100):
        session.put(frame(i % 9, i))
        await asyncio.sleep(0.01)
        assert host.running <= 1
    await until(lambda: sum(fates(session).values()) == 100)
    await session.close()
    async for event in events:
        if isinstance(event, FrameAck) and event.kept:
            ages.append(event.age_ms)
    counts = fates(session)
    assert counts["superseded"] + counts.get("rate", 0) > 60
    assert 3 <= counts["kept"] <= 20
    assert max(ages) < 2000


async def test_a_flood_from_another_thread_is_counted_to_the_last_frame(host, opened):
    session = opened(fps=5.0)

    def flood():
        for i in range(2000):
            session.put(frame(i % 2, i))

    thread = threading.Thread(target=flood)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.01)
    await until(lambda: sum(fates(session).values()) >= 1999)
    assert host.glances < 200


async def test_a_fast_camera_is_looked_at_a_few_times_for_each_frame_it_may_send(host, opened):
    session = opened(fps=5.0)
    began = time.monotonic()
    for i in range(200):
        session.put(frame(1, i))
        await asyncio.sleep(0.005)
    looks = 20 * (time.monotonic() - began)
    await until(lambda: sum(fates(session).values()) == 200)
    assert host.glances <= looks + 2
    counts = fates(session)
    assert counts["rate"] > 0
    assert counts["rate"] + counts.get("superseded", 0) >= 150


async def test_a_change_too_soon_waits_for_its_time_and_the_newest_is_shown(host, opened):
    session = opened(fps=4.0)
    await show(session, 1)
    began = time.monotonic()
    for i, place in enumerate((2, 3, 4)):
        session.put(frame(place, 10 + i))
        await asyncio.sleep(0.02)
    await until(lambda: fates(session).get("kept") == 2)
    assert time.monotonic() - began > 0.1
    assert session.known.seq == 12
    assert fates(session)["rate"] == 2


async def test_a_camera_that_changes_size_goes_on(opened):
    session = opened()
    await show(session, 1)
    small = frame(2, 1, data=frame_file(scene(2, (48, 120))))
    session.put(small)
    await until(lambda: fates(session).get("kept") == 2)


def frame_file(pixels):
    from helpers.media_files import picture_file

    return picture_file(pixels, "JPEG")


async def test_raw_frames_are_seen_too(host, opened):
    session = opened()
    now = time.monotonic()
    session.put(_raw(scene(1), now, 1))
    await until(lambda: fates(session) == {"kept": 1})
    session.put(_raw(scene(1), time.monotonic(), 2))
    await until(lambda: fates(session) == {"kept": 1, "unchanged": 1})
    assert host.glances == 0


def _raw(pixels, at, seq, **fields):
    from mmserve.live.frame import Frame

    return Frame(seq=seq, pixels=pixels, captured=at, received=at, **fields)


async def test_frames_that_were_judged_elsewhere_are_not_judged_again(host, opened):
    session = opened()
    session.put(frame(1, 1, gated="first"))
    await until(lambda: fates(session) == {"kept": 1})
    session.put(frame(1, 2, gated="heartbeat"))
    await until(lambda: fates(session) == {"kept": 2})
    assert host.glances == 0
    session.drop("unchanged", 5, time.monotonic(), count=3)
    session.drop("decode_error", 6, time.monotonic())
    assert fates(session) == {"kept": 2, "unchanged": 3, "decode_error": 1}
    assert session.known.seq == 5


async def test_two_frames_make_an_item_where_they_go_in_pairs(host, opened):
    session = opened(pair=True)
    session.put(frame(1, 1))
    await until(lambda: host.glances == 1)
    session.put(frame(2, 2))
    await until(lambda: fates(session) == {"kept": 2})
    (item,) = session.context.trunk.items()
    assert item.pixels is None or item.pixels.shape[0] == 2
    assert host.seen == 1


async def test_half_a_pair_goes_alone_when_a_question_comes(host, opened):
    session = opened(pair=True, fps=0.5)
    session.put(frame(1, 1))
    await said(session.ask("what"))
    assert fates(session) == {"kept": 1}
    assert len(host.asked[0].items) == 1


async def test_raw_frames_of_two_sizes_do_not_make_a_pair_but_are_both_seen(opened):
    session = opened(pair=True)
    session.put(_raw(scene(1), time.monotonic(), 1))
    await asyncio.sleep(0.1)
    session.put(_raw(scene(2, (48, 96)), time.monotonic(), 2))
    await until(lambda: fates(session) == {"kept": 2})


async def test_a_context_that_could_not_be_computed_ahead_is_computed_with_the_next_frame(host, opened):
    session = opened()
    await show(session, 1)
    await until(lambda: len(host.warms) == 2)
    host.fault = Overloaded("full")
    await show(session, 2, seq=1)
    await until(lambda: len(host.warms) == 3)
    host.fault = None
    await show(session, 3, seq=2)
    await until(lambda: len(host.warms) == 4)
    assert len(host.warms[-1].items) == 3
    assert fates(session) == {"kept": 3}


async def test_for_one_frame_that_the_engine_lost_that_one_alone_is_decoded_again(host, opened):
    session = opened()
    await show(session, *range(5))
    trunk = session.context.trunk
    first, *between, last = trunk.items()
    assert len(between) == 3
    assert first.pixels is None, "the engine has had them"
    again = session.pixels_again(trunk.sources())
    assert (await again(frozenset({first.digest}))).keys() == {first.digest}
    assert host.again == [1]
    assert (await again(frozenset({first.digest, last.digest}))).keys() == {first.digest, last.digest}
    assert host.again == [1, 2]


async def test_the_end_of_the_engine_ends_the_session(host, opened):
    session = opened()
    events = session.events()
    await show(session, 1)
    await until(lambda: len(host.warms) == 2)
    host.fault = EngineDead("it ended")
    await show(session, 2)
    async for event in events:
        last = event
    assert last == Closed(reason="it ended")


# ---------------------------------------------------------------- answers


async def test_pieces_tell_the_age_of_the_newest_frame_known(host, opened):
    session = opened()
    session.put(frame(1, 41, age=0.5))
    host.pace_s = 0.05
    pieces, _ = await said(session.ask("what"))
    assert {piece.frame_seq for piece in pieces} == {41}
    ages = [piece.age_ms for piece in pieces]
    assert ages == sorted(ages)
    assert 500 <= ages[0] < ages[-1] < 5000


async def test_a_question_waits_for_the_frame_that_came_before_it(host, opened):
    session = opened(fps=0.1)
    await show(session, 1)
    session.put(frame(2, 1))
    await said(session.ask("what"))
    assert len(host.asked[0].items) == 2


async def test_without_any_frame_a_question_is_answered_too(host, opened):
    pieces, text = await said(opened().ask("what"))
    assert text == "it is black"
    assert (pieces[0].age_ms, pieces[0].frame_seq) == (None, None)


async def test_frames_go_on_arriving_while_an_answer_is_said(host, opened):
    session = opened()
    await show(session, 1)
    host.pace_s = 0.2
    asking = asyncio.create_task(said(session.ask("what")))
    await until(lambda: host.asked)
    await show(session, 2, 3, seq=1)
    assert not asking.done()
    assert fates(session)["kept"] == 3
    await asking
    assert len(host.asked[0].items) == 1


async def test_question_and_answer_become_text_of_the_context(host, opened):
    session = opened()
    await show(session, 1)
    await said(session.ask("Hello"))
    await show(session, 2, seq=1)
    await until(lambda: len(host.warms[-1].items) == 2)
    text = host.writer.text.decode(host.warms[-1].token_ids, skip_special_tokens=False)
    assert "Hello<|im_end|>\n<|im_start|>assistant\n" in text
    assert text.rstrip().endswith("<|vision_end|>")


@pytest.mark.parametrize("fields", [{"memory": 0}, {"remember": False}])
async def test_nothing_is_remembered_where_nothing_shall_be(host, opened, fields):
    session = opened(memory=fields.get("memory", 4))
    await show(session, 1)
    before = session.context_tokens
    await said(session.ask("Hello", remember=fields.get("remember", True)))
    assert session.context_tokens == before


async def test_earlier_answers_leave_in_bulk(host, opened):
    session = opened(memory=4)
    await show(session, 1)
    for _ in range(20):
        await said(session.ask("Hello"))
    kinds = [segment.kind for segment in session.context.trunk.segments]
    assert kinds.count("exchange") <= 4
    assert kinds.count("frame") == 1
    assert len(host.orders) < 10


async def test_a_newer_question_cuts_the_older(host, opened):
    session = opened(on_new_question="cut")
    host.pace_s = 0.1
    host.words = ["long "] * 100
    first = asyncio.create_task(said(session.ask("Hello")))
    await until(lambda: host.asked)
    host.words = ["short"]
    _, text = await said(session.ask("which"))
    pieces, _ = await first
    assert pieces[-1].finish_reason == "cut"
    assert text == "short"
    assert host.aborted == [host.asked[0].request_id]
    assert session.stats()["answers"] == {"running": 0, "cut": 1, "stop": 1}


async def test_or_waits_for_it(host, opened):
    session = opened(on_new_question="finish")
    host.pace_s = 0.02
    first = asyncio.create_task(said(session.ask("Hello")))
    await until(lambda: host.asked)
    second = asyncio.create_task(said(session.ask("which")))
    pieces, text = await first
    assert (pieces[-1].finish_reason, text) == ("stop", "it is black")
    assert (await second)[1] == "it is black"
    assert host.aborted == []
    text = host.writer.text.decode(host.asked[1].token_ids, skip_special_tokens=False)
    assert "Hello" in text


async def test_cancelling_ends_those_under_way_and_those_that_wait(host, opened):
    session = opened(on_new_question="finish")
    host.pace_s = 0.1
    host.words = ["long "] * 100
    asking = [asyncio.create_task(said(session.ask("Hello"))) for _ in range(2)]
    await until(lambda: host.asked)
    await asyncio.sleep(0.15)
    assert session.cancel()
    for pieces, _ in await asyncio.gather(*asking):
        assert pieces[-1].finish_reason == "cancelled"
    assert host.running == 0
    assert not session.cancel()


async def test_what_was_said_before_a_cut_is_remembered(host, opened):
    session = opened()
    host.pace_s = 0.05
    host.words = ["long "] * 100
    asking = asyncio.create_task(said(session.ask("Hello")))
    await until(lambda: host.asked)
    await asyncio.sleep(0.2)
    session.cancel()
    await asking
    assert [s.kind for s in session.context.trunk.segments] == ["head", "exchange"]


async def test_closing_the_stream_aborts(host, opened):
    session = opened()
    host.pace_s = 0.05
    host.words = ["long "] * 100
    asking = session.ask("Hello")
    await anext(asking)
    await asking.aclose()
    assert host.running == 0
    assert len(host.aborted) == 1


async def test_an_answer_beyond_its_deadline_ends_with_the_error(host, opened):
    session = opened(deadline_ms=200)
    host.pace_s = 0.05
    host.words = ["long "] * 100
    found = []
    with pytest.raises(DeadlineExceeded, match="deadline_ms") as caught:  # noqa: PT012
        async for piece in session.ask("Hello"):
            found.append(piece)
    assert caught.value.param == "deadline_ms"
    assert found
    assert host.asked[0].deadline is not None
    assert host.running == 0


async def test_a_question_may_bring_a_deadline_of_its_own(host, opened):
    session = opened(deadline_ms=60_000)
    host.pace_s = 0.05
    host.words = ["long "] * 100
    with pytest.raises(DeadlineExceeded):
        await said(session.ask("Hello", deadline_ms=100))


async def test_the_engine_s_refusal_is_the_caller_s_error(host, opened):
    session = opened()
    await show(session, 1)
    host.fault = InvalidRequest("no", param="seed")
    with pytest.raises(InvalidRequest, match="no"):
        await said(session.ask("Hello"))
    host.fault = None
    assert (await said(session.ask("Hello")))[1] == "it is black"


async def test_a_closed_session_answers_no_more(host, opened):
    session = opened()
    await session.close()
    await session.close()
    with pytest.raises(MMServeError, match="closed"):
        await said(session.ask("Hello"))


async def test_closing_ends_answers_under_way(host, opened):
    session = opened()
    host.pace_s = 0.05
    host.words = ["long "] * 100
    asking = asyncio.create_task(said(session.ask("Hello")))
    await until(lambda: host.asked)
    await session.close()
    assert (await asking)[0][-1].finish_reason == "cancelled"
    assert host.running == 0


async def test_no_question_may_fill_what_the_model_can_hold(host, opened):
    host.context_tokens = 60
    session = opened(sampling=SamplingParams())
    await said(session.ask("what"))
    assert 0 < host.asked[0].sampling.max_tokens < 60
    with pytest.raises(InvalidRequest, match="leaves no room"):
        await said(session.ask("what is this " * 50))


# ---------------------------------------------------------------- turns that are told


async def test_what_is_told_is_answered_when_nothing_is_asked(host, opened):
    session = opened()
    await session.tell(Message("user", (TextPart("Hello"),)), "a")
    await session.tell(Message("assistant", (TextPart("world"),)), "b")
    await session.tell(Message("user", (TextPart("which"),)), "c")
    await said(session.ask(()))
    text = host.writer.text.decode(host.asked[0].token_ids, skip_special_tokens=False)
    assert text.endswith(
        "user\nHello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n<|im_start|>user\nwhich<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_what_was_told_can_be_taken_back(host, opened):
    session = opened()
    await session.tell(Message("user", (TextPart("Hello"),)), "a")
    await session.tell(Message("user", (TextPart("which"),)), "b")
    assert await session.forget("a")
    assert not await session.forget("a")
    text = host.writer.text.decode(session.context.trunk.request("x").token_ids)
    assert "Hello" not in text
    assert "which" in text
    assert len(host.orders) == 1


async def test_new_instructions_stand_before_what_is_there(host, opened):
    session = opened(instructions="Look")
    await show(session, 1)
    await session.update(instructions="Describe")
    await until(lambda: "Describe" in host.writer.text.decode(host.warms[-1].token_ids))
    assert len(host.warms[-1].items) == 1


async def test_a_new_policy_holds_from_now_on(host, opened):
    session = opened(window_items=8)
    heard = []
    session.changed.append(heard.append)
    await show(session, *range(6))
    await session.update(SessionPolicy(fps=50.0, window_items=2, on_new_question="finish"))
    assert heard == [session.policy]
    assert session.stats()["context_frames"] <= 2
    await show(session, 7, seq=7)
    assert session.stats()["context_frames"] <= 2


# ---------------------------------------------------------------- triggers


async def listened(session, kind, count, seconds=10.0):
    """The first ``count`` events of ``kind``, and all those before them."""
    found = []
    async with asyncio.timeout(seconds):
        async for event in session.events():
            found.append(event)
            if sum(isinstance(e, kind) for e in found) == count:
                return found
    return found


async def test_every_so_often_the_standing_question_is_answered(host, opened):
    session = opened(trigger="every", every_s=0.1, question="what")
    found = await listened(session, Triggered, 3)
    assert {e.cause for e in found if isinstance(e, Triggered)} == {"every"}
    assert "".join(e.piece.text for e in found if isinstance(e, Spoken) and e.answer == 1) == "it is black"


async def test_a_change_has_it_answered_and_what_stays_the_same_does_not(host, opened):
    session = opened(trigger="change", question="what")
    listening = asyncio.create_task(listened(session, Triggered, 2))
    await show(session, 1, 1, 1)
    await until(lambda: len(host.asked) == 1)
    await show(session, 1, 2, seq=3)
    found = await listening
    assert [e.cause for e in found if isinstance(e, Triggered)] == ["change", "change"]
    await until(lambda: len(host.asked) == 2)


async def test_a_change_that_came_to_rest(host, opened):
    session = opened(trigger="still", still_s=0.3, question="what", fps=20.0)
    for i in range(8):
        session.put(frame(i, i))
        await asyncio.sleep(0.06)
    assert host.asked == []
    for i in range(20):
        session.put(frame(7, 10 + i))
        await asyncio.sleep(0.06)
    await until(lambda: len(host.asked) == 1)
    await asyncio.sleep(0.5)
    assert len(host.asked) == 1


async def test_a_change_after_which_no_frame_comes_is_at_rest_too(host, opened):
    session = opened(trigger="still", still_s=0.2, question="what")
    session.put(frame(1))
    await until(lambda: len(host.asked) == 1)


@pytest.mark.parametrize(("policy", "ends"), [("cut", "cut"), ("finish", "stop")])
async def test_an_answer_about_the_old_scene_is_cut_or_finished(host, opened, policy, ends):
    session = opened(trigger="change", question="what", on_new_question=policy)
    host.pace_s = 0.1
    listening = asyncio.create_task(listened(session, Triggered, 2))
    await show(session, 1)
    await until(lambda: host.asked)
    await show(session, 2, seq=1)
    await listening
    await until(lambda: sum(session.stats()["answers"].values()) - session.stats()["answers"]["running"] == 2)
    assert session.stats()["answers"].get("cut", 0) == (ends == "cut")


async def test_a_trigger_never_cuts_what_somebody_asked(host, opened):
    session = opened(trigger="change", question="what")
    await until(lambda: not session.cancel())
    host.pace_s = 0.1
    asking = asyncio.create_task(said(session.ask("Hello")))
    await until(lambda: host.asked)
    await show(session, 1, 2, 3)
    _, text = await asking
    assert text == "it is black"
    await until(lambda: len(host.asked) >= 2)


async def test_a_triggered_answer_that_fails_is_told(host, opened):
    session = opened(trigger="every", every_s=0.1, question="what")
    host.fault = InvalidRequest("no")
    found = await listened(session, Failed, 1)
    assert found[-1].error["message"] == "no"


async def test_what_was_said_before_a_close_is_told_before_the_end(host, opened):
    """However soon after the last word it comes: here before anybody could read that."""
    session = opened(trigger="change", question="what")
    events = session.events()
    speak, closing = host.answer, []

    async def answer(request, pixels):
        if request.warm:
            async for word in speak(request, pixels):
                yield word
            return
        words = [word async for word in speak(request, pixels)]
        closing.append(asyncio.create_task(session.close()))
        for word in words:
            yield word

    host.answer = answer
    session.put(frame(1))
    async with asyncio.timeout(10):
        found = [event async for event in events]
    (closed,) = closing
    await closed
    pieces = [event.piece for event in found if isinstance(event, Spoken)]
    assert "".join(piece.text for piece in pieces) == "it is black"
    assert pieces[-1].finish_reason == "stop"
    assert isinstance(found[-1], Closed)


async def test_a_triggered_answer_that_a_close_ends_is_told_so(host, opened):
    session = opened(trigger="change", question="what")
    events = session.events()
    host.pace_s = 0.05
    host.words = ["long "] * 100
    session.put(frame(1))
    await until(lambda: host.asked)
    await session.close()
    found = [event async for event in events]
    assert isinstance(found[-1], Closed)
    assert [e.piece.finish_reason for e in found if isinstance(e, Spoken)][-1] == "cancelled"
    assert host.running == 0


async def test_of_questions_at_the_same_moment_the_older_is_told_that_it_is_cut(host, opened):
    """Though it has not even begun."""
    session = opened()
    async with asyncio.timeout(10):
        (older, _), (_, newer) = await asyncio.gather(said(session.ask("one")), said(session.ask("two")))
    assert [piece.finish_reason for piece in older] == ["cut"]
    assert newer == "it is black"
    assert session.stats()["answers"] == {"running": 0, "cut": 1, "stop": 1}


# ---------------------------------------------------------------- for ever


async def test_memory_is_constant_over_many_windows(spec):
    host = FakeHost(spec, limits=Limits(tokens=600, positions=400))
    session = host.open(window_items=6, fps=60.0)
    sizes, kept = [], []
    for i in range(150):
        session.put(frame(i % 9, i))
        await session.settled()
        await until(lambda i=i: session.known is not None and session.known.seq == i)
        sizes.append(session.context_tokens)
        kept.append(session.kept_bytes)
    assert max(sizes[75:]) <= max(sizes[:40]) + 12, "but for the digits of the frames' seconds"
    assert max(kept[75:]) <= max(kept[:40]) * 1.2
    stats = session.stats()
    assert stats["context_frames"] <= 6
    assert stats["next_position"] < 500
    assert stats["drops"] >= 20
    assert any(order.shift for order in host.orders)
    assert len(session._watcher._open) <= 1
    await session.close()


async def test_ages_are_told_by_stage(host, opened):
    session = opened()
    await show(session, 1)
    await said(session.ask("what"))
    await until(lambda: "prefilled" in session.stats()["ages_ms"])
    stages = session.stats()["ages_ms"]
    assert {"received", "gated", "decoded", "prefilled", "first_token"} <= stages.keys()
    assert stages["received"]["p50"] <= stages["gated"]["p50"] <= stages["decoded"]["p50"]
    text = host.metrics.render().decode()
    assert 'mmserve_live_frames_total{fate="kept"} 1.0' in text
    assert 'mmserve_live_frame_age_seconds_count{stage="first_token"} 1.0' in text


async def test_a_listener_that_falls_behind_loses_the_oldest(host, opened):
    session = opened()
    events = session.events(limit=4)
    await show(session, 1, *[1] * 20)
    await session.close()
    found = [event async for event in events]
    assert len(found) == 4
    assert isinstance(found[-1], Closed)
    assert found[0].seq > 10


def test_pixels_of_scenes_differ():
    """What the tests above go by."""
    assert not np.array_equal(scene(1), scene(2))
