import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import SamplingParams
from mmserve.server.protocol import RefusedFields, SamplingFields
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


@pytest.mark.parametrize(
    "field",
    [
        {"use_beam_search": True},
        {"length_penalty": 0.8},
        {"truncate_prompt_tokens": 5},
        {"guided_json": {"type": "object"}},
        {"logits_processors": ["x"]},
        {"include_reasoning": False},
        {"function_call": "auto"},
        {"return_token_ids": True},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field):
    with pytest.raises(InvalidRequest) as refused:
        SamplingFields(**field).refuse()
    assert refused.value.param == next(iter(field))


def test_values_that_ask_for_nothing_are_taken():
    idle = {"use_beam_search": False, "length_penalty": 1.0, "include_reasoning": True, "vllm_xargs": {}}
    SamplingFields(**idle, logits_processors=[], function_call="none", verbosity="medium").refuse()


def test_every_field_of_sampling_reaches_the_parameters():
    """None is parsed and forgotten: a field that the parameters do not have must be read by somebody else."""
    elsewhere = {"max_tokens", "stop", "structured_outputs"}
    own = set(SamplingFields.__struct_fields__) - set(RefusedFields.__struct_fields__) - elsewhere
    values = {
        "temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "seed": 3, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.3, "stop_token_ids": [4], "min_tokens": 2,
        "ignore_eos": True, "logit_bias": {1: 2.0}, "bad_words": ["x"], "allowed_token_ids": [9],
        "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    assert set(values) == own
    made = params(**values)
    for name, value in values.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value), name
