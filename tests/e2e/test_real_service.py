"""The whole path over a real socket: preprocessing, engine and REST service, with a small random model."""

import base64
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from helpers.dummy_model import write_dummy_model
from helpers.media_files import clip_file, picture_file
from live_server import serving

from mmserve.core.config import Config
from mmserve.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = write_dummy_model(tmp_path_factory.mktemp("dummy"))
    config = Config.of(
        model=str(folder), load_format="dummy", dtype="float32", served_model_name="dummy", kv_cache_mib=64
    )
    service = Service.load(config)
    yield service
    service.close()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, service.config) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def data_url(data, kind="image/png"):
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def picture(seed=0, size=(256, 320)):
    return picture_file(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def image(seed=0):
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed))}}


def clip():
    return {"type": "video_url", "video_url": {"url": data_url(clip_file(12), "video/mp4")}}


def text(words):
    return {"type": "text", "text": words}


def ask(client, *content, **fields):
    fields = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}, **fields}
    return client.chat.completions.create(
        model="dummy", messages=[{"role": "user", "content": list(content)}], **fields
    )


def said(answer):
    return answer.choices[0].message.content


def until(condition, seconds=2.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    return condition()


def test_ready_once_a_picture_went_through(url):
    assert until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, 10)


def test_a_stream_says_what_the_whole_answer_says(client):
    content = [text("Look at two pictures"), image(1), image(2), text("and"), clip(), text("which one?")]
    whole = ask(client, *content, logprobs=True, top_logprobs=3)
    stream = ask(client, *content, logprobs=True, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == said(whole)
    assert last.usage == whole.usage
    assert whole.usage.completion_tokens == 24
    details = whole.usage.prompt_tokens_details
    assert details.image_tokens > 0
    assert details.video_tokens > 0
    tokens = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [t.token for t in tokens] == [t.token for t in whole.choices[0].logprobs.content]
    for entry in whole.choices[0].logprobs.content:
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)


def test_eight_at_once_say_what_they_say_alone(client):
    prompts = [[image(seed), text("what is in this picture")] for seed in range(6)]
    prompts += [[text("Hello world")], [clip(), text("describe")]]
    alone = [said(ask(client, *prompt)) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: said(ask(client, *prompt)), prompts))
    assert together == alone


def test_nothing_of_a_stop_text_is_shown(client):
    whole = said(ask(client, text("Hello")))
    stop = whole[5:8]
    before = whole[: whole.index(stop)]
    short = ask(client, text("Hello"), stop=stop)
    assert (said(short), short.choices[0].finish_reason) == (before, "stop")
    chunks = list(ask(client, text("Hello"), stop=["never ever", stop], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == before


def test_choices_are_drawn_apart_and_again_the_same(client):
    def draw():
        answer = ask(client, text("Hello"), n=3, seed=11, temperature=1)
        return [choice.message.content for choice in answer.choices]

    first = draw()
    assert len(set(first)) == 3
    assert draw() == first


def test_a_biased_token_is_the_one_that_is_chosen(client, service):
    (token,) = service.tokenize("colour")
    answer = ask(client, text("Hello"), logit_bias={str(token): 100}, max_tokens=3)
    assert said(answer) == "colour" * 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_pages_within_a_second(url, service, stream):
    before = service.stats()
    content = [image(9), text("Hello")]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3000, "ignore_eos": True}
    payload = json.dumps({**body, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(head.encode() + payload)
        assert until(lambda: service.stats()["running"] == 1)
    assert until(lambda: service.stats()["running"] == 0, 1.0)
    assert until(lambda: service.stats()["kv_pages_free"] == before["kv_pages_free"])


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": data_url(b"not a picture")}}, "image_url"),
        ({"type": "video_url", "video_url": {"url": data_url(b"not a clip", "video/mp4")}}, "video_url"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": data_url(picture()[:60])}}, "image_url"),
    ],
)
def test_bad_media_names_its_place_and_harms_nobody(client, part, field):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text("see"), part, stream=True)
    assert caught.value.param == f"messages[0].content[1].{field}"
    assert said(ask(client, image(), text("Hello")))


def test_too_much_is_a_400_that_counts(client):
    with pytest.raises(openai.BadRequestError, match="5000") as caught:
        ask(client, text("Hello"), max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text("Hello " * 6000))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_pixel_limits_work_in_all_three_places(client):
    def tokens(part, **extra):
        answer = ask(client, part, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.image_tokens

    part, url = image(), image()["image_url"]["url"]
    few = tokens(part | {"max_pixels": 4096})
    assert few < tokens(part)
    assert few == tokens({"type": "image_url", "image_url": {"url": url, "max_pixels": 4096}})
    assert few == tokens(part, mm_processor_kwargs={"max_pixels": 4096})


def test_a_caption_of_an_upload_and_of_a_clip(url):
    for data in (picture(3), clip_file(12)):
        answer = httpx.post(f"{url}/v1/captions", files={"image": data}, data={"max_tokens": "5"}, timeout=30)
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] <= 5
        assert sum(usage["prompt_tokens_details"].values()) > 0
