import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import SamplingParams
from mmserve.server.protocol import SamplingFields
from mmserve.server.sampling import SMALLEST_TOP_P, sampling_params


def params(advice=(), max_tokens=None, **fields):
    return sampling_params(SamplingFields(**fields), dict(advice), 100, max_tokens=max_tokens)


def test_openai_defaults_where_nobody_says_anything():
    assert params() == SamplingParams()


def test_the_models_advice_yields_to_the_request():
    advice = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "unrelated": 3}
    made = params(advice, temperature=0.0)
    assert (made.temperature, made.top_k, made.repetition_penalty) == (0.0, 20, 1.05)
    assert params(advice, top_k=-1).top_k == 0


def test_top_p_zero_means_the_likeliest_token():
    assert params(top_p=0.0).top_p == SMALLEST_TOP_P


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {100: 1.0}}, {"logit_bias": {-1: 1.0}}, {"stop_token_ids": [100]}]
)
def test_token_ids_must_be_in_the_vocabulary(fields):
    with pytest.raises(InvalidRequest, match="0 to 99"):
        params(**fields)


def test_min_tokens_must_not_pass_max_tokens():
    with pytest.raises(InvalidRequest, match="at most max_tokens"):
        params(min_tokens=5, max_tokens=4)
    assert params(min_tokens=5, max_tokens=5).min_tokens == 5
