"""Who may watch, and who slows down."""

import pytest

from mmserve.core.errors import Overloaded
from mmserve.live.admission import MEASURED, Capacity, Meter, Rate
from mmserve.live.policy import SessionPolicy


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def measured(cost, limit=1.0, **fields):
    """A capacity at which frames cost ``cost`` seconds."""
    clock = Clock()
    capacity = Capacity(limit, clock=clock, **fields)
    for _ in range(MEASURED):
        capacity.note("frame", cost)
    return capacity, clock


def watching(capacity, clock, seats, seconds=60.0):
    """All ``seats`` send what they may."""
    end = clock.now + seconds
    due = dict.fromkeys(seats, clock.now)
    while clock.now < end:
        clock.now = min(due.values())
        for seat in seats:
            if due[seat] <= clock.now:
                seat.kept()
                due[seat] = clock.now + 1.0 / seat.fps


def test_uses_at_once_share_the_time():
    clock = Clock()
    meter = Meter(clock)
    with meter.using() as first:
        clock.now += 1.0
        with meter.using() as second:
            clock.now += 2.0
            assert second() == pytest.approx(1.0)
        clock.now += 1.0
        assert first() == pytest.approx(3.0)


def test_a_rate_comes_near_the_truth_and_fades():
    clock = Clock()
    rate = Rate(clock)
    for _ in range(1000):
        clock.now += 0.1
        rate.add()
    assert rate.now == pytest.approx(10.0, rel=0.05)
    clock.now += 60.0
    assert rate.now < 0.3


def test_nobody_slows_down_while_there_is_room():
    capacity, clock = measured(0.1)
    seats = [capacity.admit(SessionPolicy(fps=2.0)) for _ in range(4)]
    watching(capacity, clock, seats)
    assert capacity.load == pytest.approx(0.8, rel=0.1)
    assert [seat.fps for seat in seats] == [2.0] * 4
    assert capacity.shrunk == 1.0


def test_frames_become_fewer_first_and_smaller_then():
    capacity, clock = measured(0.25)
    seats = [capacity.admit(SessionPolicy(fps=2.0)) for _ in range(4)]
    watching(capacity, clock, seats)
    assert seats[0].fps == pytest.approx(1.0, rel=0.1)
    assert capacity.shrunk == 1.0
    seats += [capacity.admit(SessionPolicy(fps=2.0)) for _ in range(8)]
    watching(capacity, clock, seats)
    assert seats[0].fps == pytest.approx(0.5)
    assert seats[0].max_pixels < SessionPolicy().max_pixels / 1.3


def test_what_nothing_helps_is_refused_with_the_reason():
    capacity, _ = measured(1.0)
    with pytest.raises(Overloaded, match="cameras here") as caught:  # noqa: PT012 (one of them)
        for _ in range(20):
            capacity.admit(SessionPolicy(fps=4.0))
    assert caught.value.status == 503
    assert 2 <= len(capacity.seats) < 20
    assert capacity.refused == 1


def test_idle_cameras_cost_nothing():
    capacity, clock = measured(0.2)
    idle = [capacity.admit(SessionPolicy(fps=2.0)) for _ in range(16)]
    clock.now += 120.0
    assert capacity.load < 0.05
    busy = [capacity.admit(SessionPolicy(fps=2.0)) for _ in range(2)]
    watching(capacity, clock, busy)
    assert busy[0].fps == 2.0
    for seat in idle:
        seat.leave()
        seat.leave()
    assert len(capacity.seats) == 2


def test_weight_keeps_frames():
    capacity, clock = measured(0.5)
    light = capacity.admit(SessionPolicy(fps=2.0, weight=0.5))
    heavy = capacity.admit(SessionPolicy(fps=2.0, weight=2.0))
    watching(capacity, clock, [light, heavy])
    assert heavy.fps > light.fps


def test_sessions_are_counted():
    capacity = Capacity(most=1)
    seat = capacity.admit(SessionPolicy())
    with pytest.raises(Overloaded, match="1 live sessions"):
        capacity.admit(SessionPolicy())
    seat.leave()
    capacity.admit(SessionPolicy())


def test_a_frame_that_failed_costs_nothing_and_an_answer_that_was_cut_does():
    capacity, clock = measured(0.1)
    seat = capacity.admit(SessionPolicy())
    for kind in ("frame", "answer"):
        with pytest.raises(RuntimeError), seat.work(kind):  # noqa: PT012
            clock.now += 5.0
            raise RuntimeError
    assert capacity.frame_cost == pytest.approx(0.1)
    assert capacity.load > 0.3
