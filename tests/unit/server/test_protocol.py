import json

import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.parsing.toolbox import Toolbox
from mmserve.server.protocol import CaptionRequest, ChatRequest, convert, decode

HI = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields):
    return decode(json.dumps({**HI, **fields}).encode(), ChatRequest)


def test_unknown_fields_and_nulls_are_ignored():
    wanted = chat(user="ada", store=True, temperature=None, stop=None, n=None, tools=None)
    wanted.check()
    assert wanted.temperature is None
    assert wanted.stop_texts() == ()


def test_stop_is_one_string_or_several():
    assert chat(stop="a").stop_texts() == ("a",)
    assert chat(stop=["a", "b"]).stop_texts() == ("a", "b")


def test_logit_bias_keys_become_token_ids():
    assert chat(logit_bias={"17": -5}).logit_bias == {17: -5.0}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.5}, "temperature", "<= 2.0"),
        ({"temperature": True}, "temperature", "got bool"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 1.5}, "min_p", "<= 1.0"),
        ({"n": 129}, "n", "<= 128"),
        ({"n": 1.5}, "n", "got float"),
        ({"seed": 2**63}, "seed", "<="),
        ({"stop": [1]}, "stop[0]", "got int"),
        ({"stop": ["a"] * 17}, "stop", "length <= 16"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"frequency_penalty": 3}, "frequency_penalty", "<= 2.0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "got str"),
        ({"messages": "hi"}, "messages", "got str"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "got str"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "got array"),
    ],
)
def test_wrong_types_and_ranges_name_field_and_limit(fields, param, says):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: expected")
    assert says in caught.value.message


def test_a_missing_field_is_named():
    with pytest.raises(InvalidRequest) as caught:
        decode(b"{}", ChatRequest)
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b'{"messages": NaN}', b'{"a": "\xff"}', b"[" * 10**5]
)
def test_what_is_not_json_says_so(body):
    with pytest.raises(InvalidRequest) as caught:
        decode(body, ChatRequest)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 0}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_what_cannot_be_honoured_is_refused_not_dropped(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields).check()
    assert caught.value.param == param


def test_what_asks_for_nothing_special_passes():
    chat(
        tools=[], response_format={"type": "text"}, modalities=["text"], logprobs=True, top_logprobs=0
    ).check()


def test_thinking_is_turned_on_and_off_in_either_place():
    assert chat(enable_thinking=False).template_kwargs(Toolbox()) == {"enable_thinking": False}
    both = chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": True, "a": 1})
    assert both.template_kwargs(Toolbox()) == {"enable_thinking": True, "a": 1}
    with pytest.raises(InvalidRequest) as caught:
        chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False}).template_kwargs(Toolbox())
    assert caught.value.param == "enable_thinking"


def test_a_budget_is_for_models_that_think():
    assert chat(thinking_token_budget=0).budget("... <think> ...") == 0
    assert chat().budget(None) is None
    with pytest.raises(InvalidRequest) as caught:
        chat(thinking_token_budget=5).budget("no thoughts")
    assert caught.value.param == "thinking_token_budget"


def test_form_fields_are_text_and_become_numbers_and_flags():
    fields = {"max_tokens": "12", "stream": "true", "temperature": "0.5"}
    wanted = convert(fields, CaptionRequest, strict=False)
    assert (wanted.max_tokens, wanted.stream, wanted.temperature) == (12, True, 0.5)
    with pytest.raises(InvalidRequest) as caught:
        convert({"max_tokens": "0"}, CaptionRequest, strict=False)
    assert caught.value.param == "max_tokens"
