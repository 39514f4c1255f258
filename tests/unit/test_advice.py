"""Whoever does not say how to sample gets what the model's makers advise, everywhere alike."""

import pytest

from mmserve.advice import advised
from mmserve.core.messages import SamplingParams


def test_what_is_wanted_goes_before_the_advice_and_that_before_the_defaults():
    advice = {"temperature": 0.7, "top_p": 0.8, "do_sample": True}
    made = advised(advice, temperature=0.0, max_tokens=7, seed=None)
    assert made == SamplingParams(temperature=0.0, top_p=0.8, max_tokens=7)


@pytest.mark.parametrize(("given", "taken"), [(-1, 0), (0, 0), (20, 20), (20.0, 20)])
def test_a_negative_top_k_is_none_and_a_whole_one_a_number(given, taken):
    made = advised({"top_k": given})
    assert made.top_k == taken
    assert isinstance(made.top_k, int)
