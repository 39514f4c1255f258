"""When a frame was captured, as far as its source's timestamps tell."""

import pytest

from mmserve.live.sources.clock import JUMP_S, SourceClock


def test_a_frame_that_was_held_up_is_older_than_its_arrival():
    clock = SourceClock()
    assert clock.captured(0.0, 100.0) == 100.0
    assert clock.captured(0.1, 100.1) == pytest.approx(100.1)
    assert clock.captured(0.2, 102.2) == pytest.approx(100.2, abs=0.01)  # a burst after two silent seconds
    assert clock.captured(0.3, 102.2) == pytest.approx(100.3, abs=0.01)


def test_the_frame_with_the_least_delay_sets_the_clock():
    clock = SourceClock()
    clock.captured(0.0, 100.5)
    assert clock.captured(1.0, 101.0) == 101.0
    assert clock.captured(2.0, 102.4) == pytest.approx(102.0, abs=0.01)


def test_no_frame_is_younger_than_its_arrival():
    clock = SourceClock()
    for i in range(100):
        assert clock.captured(i * 0.04, 100 + i * 0.041) <= 100 + i * 0.041


def test_a_source_that_counts_anew_is_followed():
    clock = SourceClock()
    clock.captured(5000.0, 100.0)
    assert clock.captured(0.0, 101.0) == 101.0
    assert clock.captured(JUMP_S * 50, 102.0) == 102.0


def test_a_slow_clock_is_followed():
    clock = SourceClock()
    for i in range(36_000):  # an hour at ten a second, a clock that loses one in ten thousand
        captured = clock.captured(i * 0.1 * 0.9999, 100 + i * 0.1)
    assert captured == pytest.approx(100 + 3599.9, abs=0.05)


def test_a_source_without_times_is_taken_at_its_arrival():
    assert SourceClock().captured(None, 7.0) == 7.0
