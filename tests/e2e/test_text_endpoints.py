"""The bundled model behind the newer endpoints: they say what the chat endpoint says."""

import asyncio
import base64
import json
from pathlib import Path

import httpx
import openai
import pytest
from live_server import serving

from mmserve.batch_files import Line
from mmserve.core.config import Config
from mmserve.models import tiny
from mmserve.server.offline import Answerer
from mmserve.service import Service

SAMPLES = Path(tiny.__file__).parent / "samples"
ASKED = "What is in the picture?"
GREEDY = {"temperature": 0, "model": "mmserve/tiny-vl"}
MARKS = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def service():
    service = Service.load(Config())
    yield service
    service.close()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, Config()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def picture():
    row = next(r for r in json.loads((SAMPLES / "samples.json").read_text()) if r["kind"] == "image")
    kind = {"png": "png", "jpg": "jpeg", "webp": "webp"}[row["file"].rpartition(".")[2]]
    return f"data:image/{kind};base64," + base64.b64encode((SAMPLES / row["file"]).read_bytes()).decode()


def messages():
    parts = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": ASKED}]
    return [{"role": "user", "content": parts}]


def items():
    parts = [{"type": "input_image", "image_url": picture()}, {"type": "input_text", "text": ASKED}]
    return [{"role": "user", "content": parts}]


def chatted(client):
    return (
        client.chat.completions.create(messages=messages(), max_tokens=40, **GREEDY)
        .choices[0]
        .message.content
    )


def test_a_response_is_what_the_chat_says_whole_and_streamed(client):
    said = chatted(client)
    assert len(said) > 10
    assert client.responses.create(input=items(), max_output_tokens=40, **GREEDY).output_text == said
    with client.responses.stream(input=items(), max_output_tokens=40, **GREEDY) as stream:
        assert stream.get_final_response().output_text == said


def test_a_conversation_goes_on_about_the_picture(client):
    first = client.responses.create(input=items(), max_output_tokens=40, **GREEDY)
    second = client.responses.create(
        input="What colour is the ground?", previous_response_id=first.id, max_output_tokens=20, **GREEDY
    )
    assert second.usage.to_dict()["input_tokens_details"]["image_tokens"] > 0
    turns = [*messages(), {"role": "assistant", "content": first.output_text}]
    turns.append({"role": "user", "content": "What colour is the ground?"})
    chat = client.chat.completions.create(messages=turns, max_tokens=20, **GREEDY)
    assert second.output_text == chat.choices[0].message.content


def test_a_raw_prompt_as_text_or_ids_is_what_the_chat_says(client, url):
    turns = [{"role": "user", "content": "Hello <|im_end|> there"}]
    said = client.chat.completions.create(messages=turns, max_tokens=20, **GREEDY)
    ids = httpx.post(f"{url}/tokenize", json={"messages": turns}, timeout=60).json()["tokens"]
    assert len(ids) == said.usage.prompt_tokens
    raw = client.completions.create(prompt=ids, max_tokens=20, logprobs=1, **GREEDY)
    assert raw.choices[0].text == said.choices[0].message.content
    assert raw.usage.prompt_tokens == len(ids)
    assert len(raw.choices[0].logprobs.tokens) == raw.usage.completion_tokens
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    turns = [{"role": "user", "content": "Hello"}]
    said = client.chat.completions.create(messages=turns, max_tokens=20, **GREEDY).choices[0].message.content
    assert client.completions.create(prompt=text, max_tokens=20, **GREEDY).choices[0].text == said


def test_a_raw_prompt_with_a_placeholder_has_no_picture_to_take(client):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(prompt=MARKS, **GREEDY)
    assert refusal.value.param == "prompt"


def test_a_line_of_a_batch_is_what_the_server_says(client, service):
    body = json.dumps({"messages": messages(), "max_tokens": 40, "temperature": 0}).encode()

    async def answered():
        answerer = Answerer(service, Config())
        try:
            return await answerer.answer(Line("a", "/v1/chat/completions", body))
        finally:
            await answerer.close()

    answer = asyncio.run(answered())["response"]
    assert answer["status_code"] == 200
    assert answer["body"]["choices"][0]["message"]["content"] == chatted(client)
