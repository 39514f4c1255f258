"""What a session forgets, and when."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.messages import VisionItem
from mmserve.live.policy import SessionPolicy
from mmserve.live.trunk import Segment
from mmserve.live.window import Limits, Window

PLENTY = Limits(tokens=1 << 20, positions=1 << 20)
TOKENS = 10  # of each segment


PRUNED = VisionItem(
    digest=bytes(32), kind="video", grid=(4, 4), span=(0, 1), pixels=None, kept=np.array([1], np.int32)
)


def laid(kinds, first=1.0):
    """The head and segments of ``kinds``, a second apart, ten tokens and positions each; "pruned" is a frame
    that is not whole."""
    made = [Segment(kind="head", number=0, start=0, stop=5, position=0)]
    for i, kind in enumerate(kinds):
        made.append(
            Segment(
                kind="frame" if kind == "pruned" else kind,
                number=i + 1,
                start=5 + i * TOKENS,
                stop=5 + (i + 1) * TOKENS,
                position=5 + i * TOKENS,
                at=first + i if kind in ("frame", "pruned") else None,
                turn=i if kind == "exchange" else None,
                items=(PRUNED,) if kind == "pruned" else (),
            )
        )
    return made


def left(segments, plan):
    return [s for s in segments if s.number not in plan.drop]


def end(segments):
    return segments[-1].position + len(segments[-1])


KINDS = st.lists(st.sampled_from(["frame", "pruned", "exchange", "told"]), max_size=60)
POLICIES = st.builds(
    SessionPolicy,
    window_items=st.integers(1, 20),
    window_s=st.none() | st.floats(1, 40),
    retention=st.floats(0, 1),
    memory=st.integers(0, 6),
)
LIMITS = st.builds(Limits, tokens=st.integers(30, 500), positions=st.integers(30, 500))


@settings(deadline=None)
@given(KINDS, POLICIES, LIMITS)
def test_the_head_stays_and_order_and_bounds_are_kept(kinds, policy, limits):
    segments = laid(kinds)
    plan = Window(policy, limits).plan(segments, end(segments))
    kept = left(segments, plan)
    assert kept[0].kind == "head"
    frames = [s for s in kept if s.kind == "frame"]
    assert len(frames) <= policy.window_items
    assert len({s.turn for s in kept if s.turn is not None}) <= policy.memory
    if len(kept) > 2:
        assert sum(map(len, kept)) <= limits.tokens
    newest = [s for s in segments if s.kind == "frame"][-1:]
    if policy.memory and len(kept) > 1 and sum(map(len, segments)) <= min(limits.tokens, limits.positions):
        assert newest == frames[-1:]


@settings(deadline=None)
@given(KINDS, POLICIES)
def test_what_is_left_needs_no_second_drop(kinds, policy):
    segments = laid(kinds)
    window = Window(policy, PLENTY)
    kept = left(segments, window.plan(segments, end(segments)))
    assert not window.plan(kept, end(segments))


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(0.0, 0.9), st.integers(1, 200))
def test_drops_come_in_bulk(items, retention, shown):
    """Between two drops there are as many frames as a drop makes room for."""
    policy = SessionPolicy(window_items=items, retention=retention)
    window, kept, drops = Window(policy, PLENTY), laid([]), 0
    for segment in laid(["frame"] * shown)[1:]:
        kept = [*kept, segment]
        plan = window.plan(kept, end(kept))
        drops += bool(plan)
        kept = left(kept, plan)
    room = items + 1 - max(1, int(items * retention))
    assert drops <= shown / room + 1
    assert len(kept) - 1 <= items


def test_time_bounds_frames_from_the_newest_back():
    segments = laid(["frame"] * 12)
    window = Window(SessionPolicy(window_s=10.0, retention=0.5), PLENTY)
    assert not window.plan(segments[:-1], end(segments))
    kept = left(segments, window.plan(segments, end(segments)))
    assert [s.at for s in kept[1:]] == [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]


def test_words_go_by_their_number_and_frames_stay():
    segments = laid(["frame", "exchange", "frame", "exchange", "exchange"])
    kept = left(segments, Window(SessionPolicy(memory=2), PLENTY).plan(segments, end(segments)))
    assert [s.kind for s in kept] == ["head", "frame", "frame", "exchange"]


def test_what_was_told_before_an_answer_goes_with_it():
    segments = laid(["told", "exchange", "told", "exchange"])
    segments[1].turn, segments[3].turn = segments[2].turn, segments[4].turn
    kept = left(segments, Window(SessionPolicy(memory=1), PLENTY).plan(segments, end(segments)))
    assert [s.number for s in kept] == [0, 3, 4]


def test_near_the_last_position_survivors_move_back_and_what_stands_far_before_goes():
    segments = laid(["exchange", "frame", "frame", "frame"])
    for segment in segments[2:]:
        segment.position += 900
    limits = Limits(tokens=1 << 20, positions=600)
    plan = Window(SessionPolicy(retention=0.5), limits).plan(segments, end(segments))
    assert plan.rebase
    assert [s.number for s in left(segments, plan)] == [0, 2, 3, 4]


def test_where_all_are_near_each_other_nothing_goes():
    segments = laid(["frame"] * 4)
    for segment in segments[1:]:
        segment.position += 900
    plan = Window(SessionPolicy(), Limits(tokens=1000, positions=600)).plan(segments, end(segments))
    assert plan.rebase
    assert not plan.drop


# ---------------------------------------------------------------- frames that go on from others


def watched(policy, limits, changed, spoken=()):
    """The segments after each of as many frames as there are in ``changed``, and the plan that led there. A
    frame is whole where the window wants that, and where the whole scene has ``changed``."""
    window, kept = Window(policy, limits), laid([])
    every = laid(["frame"] * len(changed))[1:]
    for i, segment in enumerate(every):
        if not changed[i] and not window.wants_key(kept, segment.at):
            segment.items = (PRUNED,)
        kept = [*kept, segment]
        plan = window.plan(kept, end(kept))
        kept = left(kept, plan)
        yield kept, plan


@settings(deadline=None, max_examples=300)
@given(KINDS, POLICIES, LIMITS)
def test_no_frame_is_left_without_those_from_which_it_goes_on(kinds, policy, limits):
    """But the newest, where nothing else of its chain fits."""
    segments = laid(kinds)
    kept = left(segments, Window(policy, limits).plan(segments, end(segments)))
    frames = [s for s in kept if s.kind == "frame"]
    assert not frames or frames[0].key or len(frames) == 1
    if frames:
        every = [s for s in segments if s.kind == "frame"]
        assert frames == every[-len(frames) :], "no frame is taken out between others"


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.booleans(), max_size=120).map(lambda flags: [f and i % 7 == 0 for i, f in enumerate(flags)]),
    POLICIES,
)
def test_a_drop_always_finds_a_whole_frame_where_it_cuts(changed, policy):
    """Whole frames come so often that what the bounds leave begins with one, and is not much less than it
    would be if all were whole."""
    whole = watched(policy, PLENTY, [True] * len(changed))
    for (kept, plan), (plain, _) in zip(watched(policy, PLENTY, changed), whole, strict=True):
        frames = [s for s in kept if s.kind == "frame"]
        assert frames[0].key
        assert len(frames) <= policy.window_items
        if plan and policy.window_s is None:
            assert len(frames) >= max(1, int(policy.window_items * policy.retention))
        assert plain


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(0.0, 0.9))
def test_whole_frames_are_as_few_as_drops_are(items, retention):
    policy = SessionPolicy(window_items=items, retention=retention, pruning_rate=0.5)
    shown = list(watched(policy, PLENTY, [False] * 200))
    keys = sum(kept[-1].key for kept, _ in shown)
    drops = sum(bool(plan) for _, plan in shown)
    taken = items + 1 - max(1, int(items * retention))
    assert keys == -(-200 // taken)
    assert drops <= keys


def test_a_drop_by_time_or_by_tokens_cuts_before_a_whole_frame_too():
    for policy, limits in (
        (SessionPolicy(window_s=20.0, window_items=1000), PLENTY),
        (SessionPolicy(window_items=1000), Limits(tokens=300, positions=1 << 20)),
    ):
        plans = 0
        for kept, plan in watched(policy, limits, [False] * 150):
            plans += bool(plan)
            assert kept[1].key
            assert len(kept) > 8 or not plan
        assert plans > 3


def test_near_the_last_position_a_chain_that_is_cut_goes_but_for_its_newest():
    segments = laid(["frame", "pruned", "pruned", "pruned"])
    for segment in segments[2:]:
        segment.position += 900
    limits = Limits(tokens=1 << 20, positions=600)
    plan = Window(SessionPolicy(retention=0.5), limits).plan(segments, end(segments))
    assert plan.rebase
    assert [s.number for s in left(segments, plan)] == [0, 4]


def test_with_all_retained_every_frame_is_whole():
    """Each drop takes one frame then, and nobody may go on from it."""
    policy = SessionPolicy(window_items=4, retention=1.0)
    assert all(kept[-1].key for kept, _ in watched(policy, PLENTY, [False] * 20))
