"""Calls of earlier answers, as templates take them."""

import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.parsing.calls import template_calls


def test_earlier_calls_reach_the_template_as_values():
    calls = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}]
    assert template_calls(calls, "w")[0]["function"]["arguments"] == {"x": 1}
    assert template_calls([{"function": {"name": "look"}}], "w")[0]["function"]["arguments"] == {}
    assert calls[0]["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("look", "w"),
        (["look"], "w[0].function"),
        ([{"function": {"arguments": "{}"}}], "w[0].function"),
        ([{"function": {"name": "f", "arguments": "{"}}], "w[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": "[]"}}], "w[0].function.arguments"),
    ],
)
def test_earlier_calls_that_are_wrong_are_named(calls, param):
    with pytest.raises(InvalidRequest) as refusal:
        template_calls(calls, "w")
    assert refusal.value.param == param
