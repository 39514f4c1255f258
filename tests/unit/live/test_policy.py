"""Errors that name the field."""

import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.live.policy import SessionPolicy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fps", 0),
        ("fps", "2"),
        ("fps", float("nan")),
        ("fps", True),
        ("fps", None),
        ("max_pixels", 3),
        ("max_pixels", 1.5),
        ("window_s", -1),
        ("window_items", 0),
        ("retention", 1.5),
        ("memory", -1),
        ("memory", 2.0),
        ("max_frame_age_ms", 0),
        ("deadline_ms", 0),
        ("trigger", "often"),
        ("on_new_question", "ignore"),
        ("heartbeat_s", float("inf")),
        ("pair", 1),
        ("sensitivity", 2),
        ("weight", 0),
        ("pruning_rate", 1),
        ("pruning_rate", -0.5),
        ("question", 7),
        ("every_s", 3.0),
    ],
)
def test_what_is_not_allowed_names_its_field(field, value):
    with pytest.raises(InvalidRequest, match=field) as caught:
        SessionPolicy.of({field: value})
    assert caught.value.param == field


def test_an_unknown_field_is_named_with_those_that_are():
    with pytest.raises(InvalidRequest, match=r"unknown field 'frames'.*fps") as caught:
        SessionPolicy.of({"frames": 3})
    assert caught.value.param == "frames"


def test_a_trigger_needs_what_it_goes_by():
    with pytest.raises(InvalidRequest) as caught:
        SessionPolicy(trigger="every", question="what?")
    assert caught.value.param == "every_s"
    with pytest.raises(InvalidRequest) as caught:
        SessionPolicy(trigger="change")
    assert caught.value.param == "question"


def test_values_take_the_places_of_others():
    base = SessionPolicy(fps=5, window_s=10.0)
    changed = SessionPolicy.of({"window_s": None, "memory": 2}, base)
    assert (changed.fps, changed.window_s, changed.memory) == (5, None, 2)
    assert SessionPolicy.of({}) == SessionPolicy()
