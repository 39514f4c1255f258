import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import SamplingParams
from mmserve.server.protocol import SamplingFields
from mmserve.server.sampling import sampling_params


def params(advice=(), max_tokens=None, **fields):
    return sampling_params(SamplingFields(**fields), dict(advice), max_tokens=max_tokens)


def test_openai_defaults_where_nobody_says_anything():
    assert params() == SamplingParams()


def test_the_models_advice_yields_to_the_request():
    advice = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "unrelated": 3}
    made = params(advice, temperature=0.0)
    assert (made.temperature, made.top_k, made.repetition_penalty) == (0.0, 20, 1.05)
    assert params(advice, top_k=-1).top_k == 0


def test_min_tokens_must_not_pass_max_tokens():
    with pytest.raises(InvalidRequest, match="at most max_tokens"):
        params(min_tokens=5, max_tokens=4)
    assert params(min_tokens=5, max_tokens=5).min_tokens == 5
