"""What the gate lets through."""

import numpy as np
import pytest

from mmserve.live.gate import FLASH_S, Gate, cells_of
from mmserve.live.policy import SessionPolicy


def luma(level=120, patch=None, size=(48, 64)):
    """A grey gradient around ``level``, with a bright ``patch`` (top, left, side)."""
    values = np.linspace(-30, 30, size[1])[None, :] + np.full(size, float(level))
    if patch:
        top, left, side = patch
        values[top : top + side, left : left + side] = 250
    return np.clip(values, 0, 255).astype(np.uint8)


def gate(**policy):
    """A gate that was shown the plain scene at 0."""
    made = Gate(SessionPolicy(**{"fps": 10.0, "heartbeat_s": 30.0, **policy}))
    assert made.look(luma(), 0.0).action == "keep"
    made.sent(luma(), 0.0)
    return made


def test_the_first_frame_is_kept():
    assert Gate(SessionPolicy()).look(luma(), 5.0).cause == "first"


def test_the_same_again_is_dropped():
    assert gate().look(luma(), 1.0).action == "drop"


def test_a_thing_that_appears_is_a_change():
    assert gate().look(luma(patch=(10, 10, 12)), 1.0).cause == "change"


def test_light_that_changes_as_a_whole_is_none():
    made = gate()
    for i, level in enumerate((125, 135, 145, 100, 90)):
        assert made.look(luma(level), 1.0 + i).action == "drop"


def test_noise_is_none():
    made, rng = gate(), np.random.default_rng(0)
    for i in range(50):
        noisy = np.clip(luma() + rng.normal(0, 5, (48, 64)), 0, 255).astype(np.uint8)
        assert made.look(noisy, 1.0 + 0.1 * i).action == "drop"


def test_a_flash_of_one_frame_is_passed_over():
    made = gate()
    bright = np.full((48, 64), 255, np.uint8)
    verdict = made.look(bright, 1.0)
    assert (verdict.action, verdict.flash) == ("hold", True)
    assert verdict.until == pytest.approx(1.0 + FLASH_S)
    assert made.look(luma(), 1.1).action == "drop"


def test_light_that_stays_is_no_flash():
    made = gate()
    bright = np.full((48, 64), 255, np.uint8)
    assert made.look(bright, 1.0).flash
    assert made.look(bright, 1.1).action == "keep"


def test_a_slow_drift_adds_up():
    """Each step is too small to see; together they are not, since the last frame sent is what counts."""
    made, kept = gate(), 0
    for i in range(40):
        seen = luma().astype(int)
        seen[:24] += i  # the upper half grows brighter, one level at a time
        action = made.look(np.clip(seen, 0, 255).astype(np.uint8), 1.0 + 0.2 * i).action
        kept += action == "keep"
        if action == "keep":
            made.sent(np.clip(seen, 0, 255).astype(np.uint8), 1.0 + 0.2 * i)
    assert 1 <= kept <= 5


def test_a_static_scene_is_kept_at_the_heartbeat_only():
    made, kept = gate(heartbeat_s=10.0), []
    for i in range(1, 350):
        if made.look(luma(), i * 0.1).action == "keep":
            kept.append(i * 0.1)
            made.sent(luma(), i * 0.1)
    assert kept == pytest.approx([10.0, 20.0, 30.0])


def test_a_change_too_soon_is_held_until_its_time():
    made = gate(fps=2.0)
    verdict = made.look(luma(patch=(0, 0, 12)), 0.2)
    assert (verdict.action, verdict.cause) == ("hold", "change")
    assert verdict.until == pytest.approx(0.5)
    assert not verdict.flash
    assert made.look(luma(patch=(0, 0, 12)), 0.5).action == "keep"


def test_the_rate_that_the_server_allows_counts():
    made = gate(fps=10.0)
    made.fps = 1.0
    assert made.look(luma(patch=(0, 0, 12)), 0.5).until == pytest.approx(1.0)
    assert made.next_look == pytest.approx(0.75)


def test_what_comes_to_rest_is_kept_though_it_differs_little():
    made = gate(still_s=0.5, heartbeat_s=1000.0)
    moving = luma(patch=(10, 10, 12))
    assert made.look(moving, 1.0).action == "keep"
    made.sent(moving, 1.0)
    resting = moving.astype(int)
    resting[10:22, 10:22] -= 10  # less than the threshold, more than half of it
    causes = [made.look(resting.astype(np.uint8), 1.1 + 0.2 * i).cause for i in range(5)]
    assert causes[:2] == [None, None]
    assert "settled" in causes


def test_another_size_in_mid_stream_is_a_change_where_the_shape_differs():
    made = gate()
    assert made.look(luma(size=(64, 48)), 1.0).action == "keep"
    assert made.look(luma(size=(36, 64)), 2.0).action == "keep"
    made.sent(luma(size=(36, 64)), 2.0)
    assert made.look(luma(size=(36, 64)), 3.0).action == "drop"


def test_sensitivity_decides():
    faint = luma().astype(int)
    faint[8:24, 8:24] += 5
    faint = faint.astype(np.uint8)
    assert gate(sensitivity=0.0).look(faint, 1.0).action == "drop"
    assert gate(sensitivity=0.95).look(faint, 1.0).action == "keep"


def test_a_frame_that_did_not_arrive_is_not_compared_with():
    made = gate()
    made.forget()
    assert made.look(luma(), 1.0).action == "keep"


@pytest.mark.parametrize("size", [(4, 64), (64, 4), (4, 4), (48, 64), (64, 64), (5, 7)])
def test_cells_are_means_of_any_shape(size):
    cells = cells_of(np.full(size, 77, np.uint8))
    assert cells.shape[0] <= 32
    assert cells.shape[1] <= 32
    assert np.all(cells == 77)
