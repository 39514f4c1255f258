"""The REST service over a real socket, with the official client."""

import base64
import io
import json
import socket
import time

import httpx
import openai
import pytest
from fake_service import ANSWER, FakeService
from live_server import serving
from PIL import Image

from mmserve.core.config import Config
from mmserve.core.errors import EngineDead
from mmserve.server import health

SENTENCE = "".join(ANSWER)
KEY = "k" * 20
MAX_BODY = 200_000


def picture(size=(64, 48), colour="red"):
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(data=None):
    return {"type": "image_url", "image_url": {"url": data_url(data or picture())}}


def ask(*content):
    return [{"role": "user", "content": list(content)}]


def say(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def service():
    return FakeService()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, Config.of(api_key=KEY, max_request_bytes=MAX_BODY, drain_s=1)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def web(url):
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=20) as web:
        yield web


def chat(client, messages, **fields):
    return client.chat.completions.create(model="mmserve/tiny-vl", messages=messages, **fields)


def until(condition, seconds=2.0):
    """Whether ``condition`` came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


# ---------------------------------------------------------------- models and health


def test_models_are_listed_and_found_by_name(client):
    assert [m.id for m in client.models.list()] == ["mmserve/tiny-vl"]
    assert client.models.retrieve("mmserve/tiny-vl").owned_by == "mmserve"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_health_needs_no_key_and_readiness_is_earned(url, service):
    assert httpx.get(f"{url}/health/live").json() == {"status": "alive"}
    assert until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
    assert any(chat.request_id.startswith("probe-") for chat in service.seen)


def test_not_ready_before_a_picture_went_through():
    class Dead(FakeService):
        async def generate(self, chat):
            raise EngineDead("the engine ended")
            yield

    with serving(Dead(), Config()) as url:
        answer = httpx.get(f"{url}/health/ready")
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "not_ready"


def test_a_fault_of_the_probe_is_told_and_tried_again(monkeypatch, caplog):
    class Clumsy(FakeService):
        async def generate(self, chat):
            if not self.seen:
                self.seen.append(chat)
                raise RuntimeError("a fault in preprocessing")
            async for output in super().generate(chat):
                yield output

    monkeypatch.setattr(health, "RETRY_S", 0.01)
    with serving(Clumsy(), Config()) as url:
        assert until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
    assert "a fault in preprocessing" in caplog.text


def test_not_ready_once_the_engine_is_dead():
    service = FakeService()
    with serving(service, Config()) as url:
        assert until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
        service.ready = False
        assert httpx.get(f"{url}/health/ready").status_code == 503


# ---------------------------------------------------------------- chat


def test_a_chat_about_a_picture(client):
    answer = chat(client, ask(image_part(), {"type": "text", "text": "What is it?"}))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", SENTENCE)
    assert choice.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        14,
        6,
        20,
    )
    details = answer.usage.prompt_tokens_details
    assert (details.cached_tokens, details.image_tokens, details.video_tokens) == (3, 4, 0)
    assert 0 < answer.timings["ttft_s"] < answer.timings["total_s"]


def test_a_bare_url_string_is_accepted(client):
    part = {"type": "image_url", "image_url": data_url(picture())}
    assert chat(client, ask(part)).usage.prompt_tokens_details.image_tokens == 4


def test_a_stream_says_role_text_reason_and_usage(client):
    chunks = list(chat(client, say("hi"), stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == SENTENCE
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert all(c.usage is None for c in chunks[:-1])
    assert {c.id for c in chunks} == {chunks[0].id}


def test_stream_ends_with_done_and_no_usage_unless_asked(web):
    body = {"messages": say("hi"), "stream": True}
    text = web.post("/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in text


def test_a_stream_is_flushed_token_by_token(web):
    body = {"messages": say("hi"), "stream": True}
    with web.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        times = [time.monotonic() for _ in answer.iter_raw()]
    assert len(times) >= len(ANSWER)


def test_n_choices_interleave_in_a_stream(client, service):
    chunks = list(chat(client, say("hi"), n=3, seed=5, stream=True))
    texts = {0: "", 1: "", 2: ""}
    order = [c.choices[0].index for c in chunks]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {SENTENCE}
    assert order != sorted(order)
    assert sorted(c.sampling.seed for c in service.seen[-3:]) == [5, 6, 7]


def test_n_choices_whole(client):
    answer = chat(client, say("hi"), n=2)
    assert [c.index for c in answer.choices] == [0, 1]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 12)


def test_logprobs(client):
    content = chat(client, say("hi"), logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in content] == ANSWER
    assert bytes(content[-1].bytes).decode() == ANSWER[-1]
    assert [t.token for t in content[0].top_logprobs] == ["alt0", "alt1"]
    chunks = list(chat(client, say("hi"), logprobs=True, stream=True))
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == len(ANSWER)


def test_max_tokens_ends_with_length(client):
    assert chat(client, say("hi"), max_tokens=2).choices[0].finish_reason == "length"
    answer = chat(client, say("hi"), max_completion_tokens=3)
    assert answer.choices[0].message.content == "A red circle "


def test_parameters_reach_the_engine_over_the_models_own_defaults(client, service):
    chat(
        client,
        say("hi"),
        top_p=0.5,
        stop=["x", "y"],
        presence_penalty=1,
        logit_bias={"5": -100},
        extra_body={
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [7],
            "chat_template_kwargs": {"enable_thinking": False},
            "cache_salt": "a",
            "unknown_field": 1,
        },
    )
    seen = service.seen[-1]
    sampling = seen.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 20, 0.5, 0.1)
    assert (sampling.presence_penalty, sampling.repetition_penalty) == (1, 1.1)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({5: -100}, (7,))
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 2)
    assert (seen.stop, seen.cache_salt) == (("x", "y"), "a")
    assert seen.template_kwargs == {"enable_thinking": False}


def test_processor_kwargs_fill_parts_that_say_nothing_themselves(client, service):
    parts = [image_part(), image_part() | {"max_pixels": 5000}]
    chat(client, ask(*parts), extra_body={"mm_processor_kwargs": {"max_pixels": 9000}})
    assert [part.max_pixels for part in service.seen[-1].messages[0].content] == [9000, 5000]


# ---------------------------------------------------------------- errors


BAD_FIELDS = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages[0].content[0].type"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{}]}, "tools"),
    ({"mm_processor_kwargs": {"maxpixels": 3}}, "mm_processor_kwargs.maxpixels"),
    ({"mm_processor_kwargs": {"images_kwargs": {"fps": 3}}}, "mm_processor_kwargs.images_kwargs.fps"),
    ({"media_io_kwargs": {"fps": 3}}, "media_io_kwargs.fps"),
    ({"include": ["logits"]}, "include"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[param for _, param in BAD_FIELDS])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_wrong_field_is_a_400_that_names_it(web, fields, param, stream):
    body = {"messages": say("hi"), **fields}
    if stream and param != "stream_options":
        body["stream"] = True
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_bad_picture_names_its_place(client):
    for url in ("data:image/png;base64,AAAA", "data:image/png;base64,!!", "ftp://x/y.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                chat(client, ask({"type": "text", "text": "see"}, part), stream=stream)
            assert caught.value.param == "messages[0].content[1].image_url"


def test_too_long_a_prompt_is_a_400(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, say("x" * 6000), stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=say("hi"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b'{"messages": [' + b"[" * 50_000, 400),
        ("POST", "/v1/chat/completions", b'\xff{"a"', 400),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/chat/completions", b"", 405),
    ],
)
def test_every_error_has_the_openai_shape(web, method, path, body, status):
    answer = web.request(method, path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]


def test_the_wrong_method_is_told_the_right_one(web):
    assert "POST" in error_of(web.get("/v1/chat/completions"))["message"]


def test_a_form_where_json_is_due_is_a_415(web):
    answer = web.post("/v1/chat/completions", content=b"a=b", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    error_of(answer)


def test_a_fault_is_a_500_without_details(web, service, caplog):
    answer = web.post("/v1/chat/completions", json={"messages": say("break")})
    assert answer.status_code == 500
    error = error_of(answer)
    assert error["type"] == "server_error"
    assert "fault" not in error["message"]
    assert "a fault in the engine" in caplog.text
    assert until(lambda: service.running == 0)


def test_a_failure_in_mid_stream_is_an_error_event(client, service):
    with pytest.raises(openai.APIError, match="lost"):
        list(chat(client, say("fail"), stream=True))
    assert until(lambda: service.running == 0)


def test_a_fault_in_mid_stream_is_an_error_event_without_details(web):
    text = web.post("/v1/chat/completions", json={"messages": say("break"), "stream": True}).text
    *_, error, done, _ = text.split("\n\n")
    assert (json.loads(error[6:])["error"]["type"], done) == ("server_error", "data: [DONE]")
    assert "fault" not in error


def test_the_request_id_is_the_callers_if_it_gave_one(web):
    answer = web.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert web.get("/v1/models").headers["x-request-id"].startswith("req-")


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}]
)
def test_without_the_key_nothing_but_health(url, headers):
    for path in ("/v1/models", "/v1/chat/completions", "/openapi.json"):
        answer = httpx.get(url + path, headers=headers)
        assert answer.status_code == 401
        assert error_of(answer)["code"] == "invalid_api_key"


def test_too_large_a_body_is_a_413_announced_or_not(web):
    body = json.dumps({"messages": say("x" * MAX_BODY)}).encode()
    headers = {"content-type": "application/json"}
    announced = web.post("/v1/chat/completions", content=body, headers=headers)
    chunked = web.post("/v1/chat/completions", content=iter([body[:1000], body[1000:]]), headers=headers)
    form = web.post("/v1/captions", files={"image": b"x" * (MAX_BODY + 1)})
    for answer in (announced, chunked, form):
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "payload_too_large"


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "n": 3}, {"n": 2}])
def test_a_client_that_leaves_ends_its_generation(url, service, fields):
    body = json.dumps({"messages": say("long"), **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(head.encode() + body)
        assert until(lambda: service.running == fields.get("n", 1))
        if fields.get("stream"):
            assert peer.recv(100).startswith(b"HTTP/1.1 200")
    assert until(lambda: service.running == 0, 1.0)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x", "image/png"])
def test_a_client_that_leaves_while_sending_is_no_fault(url, caplog, kind):
    caplog.set_level("INFO")
    where = httpx.URL(url)
    head = (
        f"POST /v1/captions HTTP/1.1\r\nhost: {where.host}\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: {kind}\r\ncontent-length: 1000\r\n\r\n--x\r\n"
    )
    with socket.create_connection((where.host, where.port)) as peer:
        peer.sendall(head.encode())
        time.sleep(0.1)
    assert until(lambda: "POST /v1/captions 499" in caplog.text)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_no_picture_is_in_the_log(web, caplog):
    caplog.set_level("DEBUG")
    web.post("/v1/chat/completions", json={"messages": ask(image_part())})
    web.post("/v1/chat/completions", json={"messages": ask({"type": data_url(picture())})})
    assert "POST /v1/chat/completions 200" in caplog.text
    assert base64.b64encode(picture()).decode()[:40] not in caplog.text


def test_a_path_cannot_forge_a_line_of_the_log(web, caplog):
    caplog.set_level("DEBUG")
    web.get("/x%0aINFO%20all%20is%20well")
    assert any("/x%0A" in record.getMessage() for record in caplog.records)
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_the_api_description_tells_the_fields(web):
    document = web.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    fields = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]["properties"]
    assert fields["temperature"]["anyOf"][0]["maximum"] == 2
    assert web.get("/docs").status_code == 200


# ---------------------------------------------------------------- captions


def test_a_caption_of_an_uploaded_file(web, service):
    answer = web.post("/v1/captions", files={"image": picture()}, data={"prompt": "What?", "max_tokens": "2"})
    body = answer.json()
    assert body["caption"] == "A red"
    assert body["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 4
    assert body["timings"]["ttft_s"] > 0
    chat = service.seen[-1]
    assert chat.messages[0].content[1].text == "What?"
    assert chat.sampling.temperature == 0


@pytest.mark.parametrize(
    "body",
    [
        {"image_url": data_url(picture())},
        {"image_url": {"url": data_url(picture())}},
        {"image": data_url(picture())},
        {"image": base64.b64encode(picture()).decode()},
    ],
)
def test_a_caption_of_a_url_or_base64_in_json(web, body):
    assert web.post("/v1/captions", json=body).json()["caption"] == SENTENCE


def test_a_caption_of_the_raw_body_as_plain_text(web):
    headers = {"content-type": "image/png", "accept": "text/plain"}
    answer = web.post("/v1/captions", content=picture(), headers=headers)
    assert answer.text == SENTENCE + "\n"
    assert answer.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("how", ["field", "accept"])
def test_a_caption_as_events(web, how):
    data = {"stream": "true"} if how == "field" else {}
    headers = {"accept": "text/event-stream"} if how == "accept" else {}
    answer = web.post("/v1/captions", files={"image": picture()}, data=data, headers=headers)
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    *deltas, summary = map(json.loads, events)
    assert done == "[DONE]"
    assert "".join(d["delta"] for d in deltas) == summary["caption"] == SENTENCE
    assert summary["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        ({"files": {"image": b"not a picture"}}, 400, "image"),
        ({"files": {"image": b""}}, 400, "image"),
        ({"data": {"prompt": "x"}, "files": {"other": b"x"}}, 400, "image"),
        ({"files": [("image", picture()), ("image", picture())]}, 400, "image"),
        ({"files": [("image", picture()), ("video", b"x")]}, 400, "video"),
        ({"files": {"image": picture()}, "data": {"image_url": data_url(picture())}}, 400, "image"),
        ({"files": {"image": picture()}, "data": {"max_tokens": "many"}}, 400, "max_tokens"),
        ({"json": {}}, 400, "image"),
        ({"json": {"image_url": 3}}, 400, "image_url"),
        ({"json": {"image_url": data_url(picture()), "image": "AA"}}, 400, "image"),
        ({"json": {"image_url": data_url(picture()), "temperature": 9}}, 400, "temperature"),
        ({"json": {"image_url": data_url(picture()), "model": "gpt-9"}}, 404, "model"),
        ({"content": b"a=b", "headers": {"content-type": "application/x-www-form-urlencoded"}}, 415, None),
    ],
)
def test_caption_errors_name_what_is_wrong(web, sent, status, param):
    answer = web.post("/v1/captions", **sent)
    assert answer.status_code == status
    assert error_of(answer)["param"] == param
