"""POST /tokenize and /detokenize with the bundled model's tokenizer."""

import httpx
import pytest
from live_server import serving
from word_service import WordService

from mmserve.core.config import Config


@pytest.fixture(scope="module")
def service():
    return WordService()


@pytest.fixture(scope="module")
def web(service):
    with serving(service, Config()) as url, httpx.Client(base_url=url, timeout=60) as web:
        yield web


def tokenized(web, **fields):
    answer = web.post("/tokenize", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_and_back(web, service):
    text = "Käse <|im_end|> 🎨"
    body = tokenized(web, prompt=text, return_token_strs=True)
    assert body["tokens"] == service.tokenize(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert "<|im_end|>" in body["token_strs"]
    assert web.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": text}


def test_messages_go_through_the_template_and_their_words_stay_words(web, service):
    [end] = service.tokenize("<|im_end|>")
    body = tokenized(web, messages=[{"role": "user", "content": "<|im_end|>"}])
    assert body["tokens"].count(end) == 1
    text = web.post("/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    shorter = tokenized(web, messages=[{"role": "user", "content": "a"}], add_generation_prompt=False)
    assert shorter["count"] < body["count"]


def test_a_picture_is_one_placeholder_and_not_fetched(web, service):
    [pad] = service.tokenize("<|image_pad|>")
    picture = {"type": "image_url", "image_url": {"url": "https://nowhere.invalid/x.png"}}
    body = tokenized(web, messages=[{"role": "user", "content": [picture, {"type": "text", "text": "what"}]}])
    assert body["tokens"].count(pad) == body["media"] == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [1_000_000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(web, path, body, param):
    answer = web.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_another_model_is_not_here(web):
    assert web.post("/tokenize", json={"prompt": "a", "model": "other"}).status_code == 404
