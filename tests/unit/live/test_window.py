"""What a session forgets, and when."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.live.policy import SessionPolicy
from mmserve.live.trunk import Segment
from mmserve.live.window import Limits, Window

PLENTY = Limits(tokens=1 << 20, positions=1 << 20)
TOKENS = 10  # of each segment


def laid(kinds, first=1.0):
    """The head and segments of ``kinds``, a second apart, ten tokens and positions each."""
    made = [Segment(kind="head", number=0, start=0, stop=5, position=0)]
    for i, kind in enumerate(kinds):
        made.append(
            Segment(
                kind=kind,
                number=i + 1,
                start=5 + i * TOKENS,
                stop=5 + (i + 1) * TOKENS,
                position=5 + i * TOKENS,
                at=first + i if kind == "frame" else None,
                turn=i if kind == "exchange" else None,
            )
        )
    return made


def left(segments, plan):
    return [s for s in segments if s.number not in plan.drop]


def end(segments):
    return segments[-1].position + len(segments[-1])


KINDS = st.lists(st.sampled_from(["frame", "exchange", "told"]), max_size=60)
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
