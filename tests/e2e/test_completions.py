"""POST /v1/completions over a real socket, with the official client."""

import httpx
import openai
import pytest
from fake_service import ANSWER
from live_server import serving
from word_service import WordService

from mmserve.core.config import Config

SENTENCE = "".join(ANSWER)


@pytest.fixture(scope="module")
def service():
    return WordService()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, Config.of(max_waiting=8)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def complete(client, prompt, **fields):
    return client.completions.create(model="mmserve/tiny-vl", prompt=prompt, **fields)


def texts(completion):
    return [(choice.index, choice.text) for choice in completion.choices]


def test_a_text_is_continued(client, service):
    answer = complete(client, "Once <|im_end|>", temperature=0.5, stop=["x"], seed=4)
    assert texts(answer) == [(0, SENTENCE)]
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        10,
        6,
        16,
    )
    asked = service.asked[-1]
    assert (asked.prompt, asked.stop, asked.messages) == ("Once <|im_end|>", ("x",), ())
    assert (asked.sampling.temperature, asked.sampling.seed, asked.sampling.max_tokens) == (0.5, 4, 16)


def test_every_prompt_has_its_answers(client, service):
    answer = complete(client, ["a", "b"], n=2, seed=7, max_tokens=2)
    assert texts(answer) == [(i, "A red ") for i in range(4)]
    assert {c.finish_reason for c in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 8)
    asked = sorted((chat.request_id[-1], chat.prompt, chat.sampling.seed) for chat in service.asked[-4:])
    assert asked == [("0", "a", 7), ("1", "a", 8), ("2", "b", 7), ("3", "b", 8)]


@pytest.mark.parametrize("several", [False, True])
def test_prompts_may_be_token_ids(client, service, several):
    ids = service.tokenize("hello <|im_end|>")
    answer = complete(client, [ids, ids] if several else ids, echo=True)
    assert texts(answer) == [(i, "hello <|im_end|>" + SENTENCE) for i in range(1 + several)]
    assert service.asked[-1].prompt == tuple(ids)


def test_a_stream_says_the_same(client):
    chunks = list(
        complete(client, ["a", "b"], echo=True, stream=True, stream_options={"include_usage": True})
    )
    for index, prompt in enumerate("ab"):
        said = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(choice.text for choice in said) == prompt + SENTENCE
        assert [choice.finish_reason for choice in said][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (20, 12)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_logprobs_have_this_endpoints_shape(client):
    whole = complete(client, "a", logprobs=2).choices[0].logprobs
    assert whole.tokens == ANSWER
    assert whole.token_logprobs == [-0.25] * 6
    assert whole.text_offset == [0, 2, 6, 13, 16, 21]
    assert whole.top_logprobs[0] == {"alt0": -1, "alt1": -2, "A ": -0.25}
    streamed = [c.choices[0].logprobs for c in complete(client, "a", logprobs=0, stream=True)]
    assert [token for part in streamed for token in part.tokens] == ANSWER
    assert [at for part in streamed for at in part.text_offset] == whole.text_offset
    assert streamed[0].top_logprobs == [None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [["a"]]}, "prompt[0]"),
        ({"prompt": [[1], [-2]]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [5_000_000]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": "x" * 6000}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(url, fields, param):
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", **fields}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_unknown_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="a")


def test_a_failure_in_mid_stream_is_an_error_event(client, service):
    with pytest.raises(openai.APIError, match="lost"):
        list(complete(client, "fail", stream=True))
