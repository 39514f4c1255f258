"""The REST service over a real socket, with the official client."""

import base64
import io
import json
import select
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
        answer = httpx.get(f"{url}/health/ready")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "nobody is at home")


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
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [{}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "look"}]}, "functions"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"mm_processor_kwargs": {"maxpixels": 3}}, "mm_processor_kwargs.maxpixels"),
    ({"mm_processor_kwargs": {"images_kwargs": {"fps": 3}}}, "mm_processor_kwargs.images_kwargs.fps"),
    ({"media_io_kwargs": {"fps": 3}}, "media_io_kwargs.fps"),
    ({"mm_processor_kwargs": {"video_pruning_rate": 1}}, "mm_processor_kwargs.video_pruning_rate"),
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
    for path in ("/v1/responses", "/v1/completions", "/tokenize", "/detokenize", "/v1/captions", "/v1/media"):
        assert "requestBody" in document["paths"][path]["post"]
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


# ---------------------------------------------------------------- what the model saw


def video_part(data=b"a clip"):
    return {"type": "video_url", "video_url": {"url": data_url(data)}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_tells_what_was_seen_if_asked(web, stream):
    body = {"messages": ask(image_part(), video_part()), "include": ["media"], "stream": stream}
    answer = web.post("/v1/chat/completions", json=body)
    last = events_of(answer)[-1] if stream else answer.json()
    image, clip = last["media"]
    assert image == {
        "param": "messages[0].content[0].image_url",
        "kind": "image",
        "format": "PNG",
        "source_size": {"width": 64, "height": 48},
        "size": {"width": 32, "height": 32},
        "grid": {"width": 4, "height": 4},
        "tokens": 4,
        "orientation": 1,
        "warnings": [],
        "cached": False,
    }
    assert (clip["param"], clip["timestamps"]) == ("messages[0].content[1].video_url", [0.0, 0.5])
    assert last["usage"]["prompt_tokens_details"]["video_tokens"] == clip["tokens"]
    assert "warnings" not in last


def events_of(answer):
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_nothing_is_told_of_media_unless_asked(web):
    body = {"messages": ask(image_part())}
    assert not {"media", "warnings"} & set(web.post("/v1/chat/completions", json=body).json())
    assert all(
        "media" not in event
        for event in events_of(web.post("/v1/chat/completions", json={**body, "stream": True}))
    )


CUT = [{"param": "messages[0].content[0].video_url", "message": "the tail is missing"}]


def test_warnings_are_told_unasked(web):
    body = {"messages": ask(video_part(b"cut")), "n": 2}
    assert web.post("/v1/chat/completions", json=body).json()["warnings"] == CUT
    events = events_of(web.post("/v1/chat/completions", json={**body, "stream": True}))
    assert [event["choices"][0]["finish_reason"] for event in events if event.get("warnings") == CUT] == [
        "stop"
    ] * 2
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of(web.post("/v1/chat/completions", json=body))
    assert (last["warnings"], last["choices"]) == (CUT, [])
    assert not any("warnings" in event for event in events)


def test_prompt_tokens_are_told_by_kind_and_add_up(web):
    usage = web.post("/v1/chat/completions", json={"messages": ask(image_part(), video_part())}).json()[
        "usage"
    ]
    details = usage["prompt_tokens_details"]
    assert details == {"text_tokens": 10, "image_tokens": 4, "video_tokens": 8, "cached_tokens": 3}
    assert sum(details[f"{kind}_tokens"] for kind in ("text", "image", "video")) == usage["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["json", "form"])
def test_a_caption_tells_what_was_seen_if_asked(web, stream, how):
    if how == "json":
        answer = web.post(
            "/v1/captions", json={"video": data_url(b"cut"), "include": ["media"], "stream": stream}
        )
    else:
        fields = {"include": "media", "stream": str(stream).lower()}
        answer = web.post("/v1/captions", files={"video": b"cut"}, data=fields)
    last = events_of(answer)[-1] if stream else answer.json()
    assert [m["kind"] for m in last["media"]] == ["video"]
    assert last["warnings"] == [{"param": "video", "message": "the tail is missing"}]


def test_options_of_a_caption_may_stand_in_the_object_beside_it_in_a_form_and_in_a_query(web, service):
    url = data_url(picture())
    for sent in (
        {"json": {"image_url": {"url": url, "max_pixels": 5000}, "max_pixels": 9000}},
        {"json": {"image_url": url, "max_pixels": 5000}},
        {"files": {"image": picture()}, "data": {"max_pixels": "5000"}},
        {"content": picture(), "headers": {"content-type": "image/png"}, "params": {"max_pixels": "5000"}},
    ):
        assert web.post("/v1/captions", **sent).status_code == 200
        assert service.seen[-1].messages[0].content[0].max_pixels == 5000
    answer = web.post("/v1/captions", json={"image_url": url, "fps": 2})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "fps")


# ---------------------------------------------------------------- sent once, asked many times


def stored(web, **sent):
    answer = web.post("/v1/media", **sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_media_are_stored_once_and_asked_about_by_id(web, service):
    media = stored(web, files={"image": picture()}, data={"max_pixels": "5000"})
    assert (media["object"], media["kind"], media["bytes"]) == ("media", "image", len(picture()))
    assert (media["tokens"], media["grid"]) == (4, {"width": 4, "height": 4})
    assert media["created_at"] < media["expires_at"]
    part = {"type": "media", "media_id": media["id"]}
    answer = web.post("/v1/chat/completions", json={"messages": ask(part)})
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 4
    seen = service.seen[-1].messages[0].content[0]
    assert (seen.data, seen.max_pixels) == (picture(), 5000)
    web.post("/v1/chat/completions", json={"messages": ask({**part, "max_pixels": 7000})})
    assert service.seen[-1].messages[0].content[0].max_pixels == 7000
    assert web.post("/v1/captions", json={"media_id": media["id"]}).json()["caption"] == SENTENCE


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"files": {"file": picture()}}, "image"),
        ({"content": picture(), "headers": {"content-type": "application/octet-stream"}}, "image"),
        ({"json": {"image_url": data_url(picture())}}, "image"),
        ({"json": {"image": base64.b64encode(picture()).decode()}}, "image"),
        ({"json": {"video_url": {"url": data_url(b"a clip"), "fps": 2}}}, "video"),
        ({"json": {"video_url": "data:video/jpeg;base64,QQ,Qg"}}, "video"),
        ({"files": {"video": b"a clip"}}, "video"),
    ],
)
def test_media_come_in_every_way(web, sent, kind):
    media = stored(web, **sent)
    assert media["kind"] == kind
    assert stored(web, **sent)["id"] == media["id"]
    assert web.get(f"/v1/media/{media['id']}").json()["tokens"] == media["tokens"]


def test_a_rate_of_pruning_reaches_the_part_from_every_place(web, service):
    media = stored(web, files={"video": b"a clip"}, data={"video_pruning_rate": "0.5"})
    clip = {"type": "video_url", "video_url": data_url(b"a clip")}
    bodies = [
        ({"messages": ask({"type": "media", "media_id": media["id"]})}, 0.5),
        ({"messages": ask({"type": "media", "media_id": media["id"], "video_pruning_rate": 0})}, 0.0),
        ({"messages": ask({**clip, "video_pruning_rate": 0.25})}, 0.25),
        ({"messages": ask(clip), "mm_processor_kwargs": {"video_pruning_rate": 0.75}}, 0.75),
        ({"messages": ask(clip), "media_io_kwargs": {"video": {"video_pruning_rate": 0.1}}}, 0.1),
        ({"messages": ask(clip)}, None),
    ]
    for body, rate in bodies:
        assert web.post("/v1/chat/completions", json=body).status_code == 200
        assert service.seen[-1].messages[0].content[0].video_pruning_rate == rate
    body = {"video_url": data_url(b"a clip"), "video_pruning_rate": 0.4}
    assert web.post("/v1/captions", json=body).status_code == 200
    assert service.seen[-1].messages[0].content[0].video_pruning_rate == 0.4


def test_other_options_are_another_id(web):
    ids = {
        stored(web, json={"image_url": data_url(picture()), **more})["id"]
        for more in ({}, {"max_pixels": 9000})
    }
    assert len(ids) == 2


def test_media_are_listed_and_removed(web):
    media = stored(web, files={"image": picture(colour="green")})
    assert media["id"] in [m["id"] for m in web.get("/v1/media").json()["data"]]
    assert web.delete(f"/v1/media/{media['id']}").json() == {
        "id": media["id"],
        "object": "media",
        "deleted": True,
    }
    for answer in (web.get(f"/v1/media/{media['id']}"), web.delete(f"/v1/media/{media['id']}")):
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "media_not_found"
    part = {"type": "media", "media_id": media["id"]}
    answer = web.post("/v1/chat/completions", json={"messages": ask(part)})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "media_not_found")
    assert error_of(answer)["param"] == "messages[0].content[0].media_id"


def test_media_of_another_owner_are_not_there(service, web):
    media = stored(web, files={"image": picture(colour="blue")})
    with serving(service, Config.of(drain_s=1)) as other, httpx.Client(base_url=other) as stranger:
        assert stranger.get(f"/v1/media/{media['id']}").status_code == 404
        assert stranger.delete(f"/v1/media/{media['id']}").status_code == 404
        assert media["id"] not in stranger.get("/v1/media").text
        part = {"type": "media", "media_id": media["id"]}
        assert stranger.post("/v1/chat/completions", json={"messages": ask(part)}).status_code == 400
    assert web.get(f"/v1/media/{media['id']}").status_code == 200


def test_a_dry_run_tells_the_cost_and_keeps_nothing(web):
    fresh = picture(colour="purple")
    before = web.get("/v1/media").json()
    told = stored(web, files={"image": fresh}, params={"dry_run": "1"})
    assert (told["dry_run"], told["tokens"], told["bytes"]) == (True, 4, len(fresh))
    assert "id" not in told
    assert web.get("/v1/media").json() == before


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        ({"files": {"image": b"not a picture"}}, 400, "image"),
        ({"json": {}}, 400, "image"),
        ({"json": {"image_url": data_url(picture()), "fps": 2}}, 400, "fps"),
        ({"json": {"image_url": {"url": data_url(picture()), "size": 2}}}, 400, "image_url.size"),
        ({"json": {"image_url": data_url(picture()), "max_pixels": 0}}, 400, "max_pixels"),
        ({"json": {"image_url": data_url(picture()), "video_pruning_rate": 0.5}}, 400, "video_pruning_rate"),
        ({"json": {"video_url": data_url(b"a clip"), "video_pruning_rate": 1}}, 400, "video_pruning_rate"),
        ({"files": {"video": b"a clip"}, "data": {"video_pruning_rate": "2"}}, 400, "video_pruning_rate"),
        ({"json": {"image_url": {}}}, 400, "image_url"),
        ({"json": {"video_url": [data_url(picture())]}}, 400, "video_url"),
        ({"json": {"media_id": "media-none"}}, 400, "media_id"),
        ({"json": {"image_url": "http://127.0.0.1/"}}, 400, "image_url"),
        ({"files": {"image": picture()}, "params": {"dry_run": "perhaps"}}, 400, "dry_run"),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, None),
        ({"files": {"image": bytes(2 << 20)}}, 413, None),
    ],
)
def test_what_cannot_be_stored_is_told_why(web, sent, status, param):
    answer = web.post("/v1/media", **sent)
    assert answer.status_code == status
    assert error_of(answer)["param"] == param


# ---------------------------------------------------------------- the caller's own names


def named(url, uuid, kind="image_url"):
    return {"type": kind, kind: url, "uuid": uuid}


def shown(service):
    return [part.data for part in service.seen[-1].messages[0].content]


def test_a_uuid_stands_for_what_it_named_last(web, service):
    first, second = picture(), picture((32, 32), "green")
    web.post("/v1/chat/completions", json={"messages": ask(named(data_url(first), "x"))})
    web.post("/v1/chat/completions", json={"messages": ask(named(None, "x"))})
    assert shown(service) == [first]
    web.post("/v1/chat/completions", json={"messages": ask(named(data_url(second), "x"))})
    assert shown(service) == [second]
    web.post("/v1/chat/completions", json={"messages": ask({"type": "image_url", "uuid": "x"})})
    assert shown(service) == [second]


def test_a_uuid_is_known_further_on_in_the_same_request(web, service):
    first, second = picture(), picture((32, 32), "green")
    parts = [named(data_url(first), "y"), named(None, "y"), named(data_url(second), "y"), named(None, "y")]
    assert web.post("/v1/chat/completions", json={"messages": ask(*parts)}).status_code == 200
    assert shown(service) == [first, first, second, second]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_unknown_uuid_is_a_400_that_names_its_part(web, stream):
    body = {"messages": ask(image_part(), named(None, "never")), "stream": stream}
    answer = web.post("/v1/chat/completions", json=body)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "media_not_found")
    assert error["param"] == "messages[0].content[1].image_url"


def test_a_uuid_of_a_picture_is_no_clip(web):
    web.post("/v1/chat/completions", json={"messages": ask(named(data_url(picture()), "z"))})
    answer = web.post("/v1/chat/completions", json={"messages": ask(named(None, "z", "video_url"))})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "messages[0].content[0].video_url")


# ---------------------------------------------------------------- shapes and limits of media


def test_options_of_the_request_reach_pictures_and_clips(web, service):
    body = {
        "messages": ask(image_part(), video_part()),
        "mm_processor_kwargs": {"max_pixels": 9000, "images_kwargs": {"max_pixels": 5000}},
        "media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 3]}, "video": {"num_frames": 4}},
    }
    assert web.post("/v1/chat/completions", json=body).status_code == 200
    image, clip = service.seen[-1].messages[0].content
    assert (image.max_pixels, image.background) == (5000, (1, 2, 3))
    assert (clip.max_pixels, clip.num_frames) == (9000, 4)


def test_frames_of_a_clip_come_as_a_list_and_count_as_one_item(web, service):
    frames = [data_url(picture((8, 8)))] * 70
    answer = web.post("/v1/chat/completions", json={"messages": ask({"type": "video", "video": frames})})
    assert answer.status_code == 200
    assert service.seen[-1].messages[0].content[0].pictures == (picture((8, 8)),) * 70


def test_too_many_pictures_or_frames_are_a_400(service):
    limits = Config.of(max_items=2, max_video_frames=3, max_image_bytes=1000, max_video_bytes=1000, drain_s=1)
    small, large = data_url(picture((8, 8))), data_url(bytes(400))
    with serving(service, limits) as url, httpx.Client(base_url=url) as web:
        for content, param, says in (
            ([image_part()] * 3, "messages", "at most 2"),
            (
                [{"type": "video", "video": [small] * 4}],
                "messages[0].content[0].video[3]",
                "at most 3 frames",
            ),
            (
                [{"type": "video", "video": [large] * 3}],
                "messages[0].content[0].video[2]",
                "1000 bytes in all",
            ),
        ):
            answer = web.post("/v1/chat/completions", json={"messages": ask(*content)})
            assert answer.status_code == 400
            assert error_of(answer)["param"] == param
            assert says in error_of(answer)["message"]


def test_a_bad_url_among_good_pictures_names_its_part(web):
    for bad, code in (
        ("http://127.0.0.1:1/a.png", "media_url_forbidden"),
        ("file:///etc/passwd", "media_url_forbidden"),
    ):
        part = {"type": "image_url", "image_url": {"url": bad}}
        error = error_of(web.post("/v1/chat/completions", json={"messages": ask(image_part(), part)}))
        assert (error["code"], error["param"]) == (code, "messages[0].content[1].image_url")


# ---------------------------------------------------------------- what is no request


@pytest.fixture(scope="module")
def hasty(service):
    with serving(service, Config.of(drain_s=1, body_idle_s=0.5)) as url:
        yield httpx.URL(url)


def said(url, *pieces, pause=0.0):
    """All that the server answers to ``pieces`` of bytes, until it closes; then no more is sent."""
    with socket.create_connection((url.host, url.port), timeout=20) as peer:
        for piece in pieces:
            peer.sendall(piece)
            if select.select([peer], [], [], pause)[0]:
                break
        answer = b""
        while chunk := peer.recv(1 << 16):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


HEAD = b"POST /v1/captions HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: 1000\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\xfc\r\n\r\n",
        b"GET /" + b"a" * 100_000,
    ],
)
def test_what_is_not_http_is_a_400_in_the_same_shape(hasty, sent):
    status, error = said(hasty, sent)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")


def test_a_body_that_stops_being_http_is_no_fault(hasty, caplog):
    head = HEAD.replace(b"content-length: 1000", b"transfer-encoding: chunked")
    status, error = said(hasty, head + b"\r\n5\r\nhello\r\nnonsense\r\n")
    assert (status, error["code"]) == (400, "invalid_http")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/captions HT", HEAD], ids=["nothing", "line", "head"])
def test_a_head_that_does_not_end_is_a_408(hasty, sent):
    status, error = said(hasty, sent)
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_body_that_stays_away_is_a_408(hasty):
    status, error = said(hasty, HEAD + b"\r\n", b"some")
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_body_that_trickles_is_a_408(hasty):
    status, error = said(hasty, HEAD + b"\r\n", *[b"x"] * 8, pause=0.2)
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_slow_client_hinders_nobody(hasty, service):
    with socket.create_connection((hasty.host, hasty.port)) as slow:
        slow.sendall(HEAD)
        assert (
            httpx.post(
                f"{hasty}/v1/captions", content=picture(), headers={"content-type": "image/png"}
            ).status_code
            == 200
        )


@pytest.mark.parametrize("depth", [200, 900, 100_000])
@pytest.mark.parametrize("where", ["messages", "content", "extra", "kwargs", "template"])
def test_deep_json_is_no_fault(web, depth, where):
    deep = "[" * depth + "]" * depth
    hi = '"messages": [{"role": "user", "content": "hi"}]'
    body = {
        "messages": f'{{"messages": {deep}}}',
        "content": f'{{"messages": [{{"role": "user", "content": {deep}}}]}}',
        "extra": f'{{"messages": [{{"role": "user", "content": "hi", "name": {deep}}}]}}',
        "kwargs": f'{{{hi}, "mm_processor_kwargs": {{"video": {deep}}}}}',
        "template": f'{{{hi}, "chat_template_kwargs": {{"x": {deep}}}}}',
    }[where][:MAX_BODY]
    answer = web.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/captions", "/v1/media"])
def test_no_base64_is_in_the_log_of_good_or_bad_requests(web, caplog, path):
    caplog.set_level("DEBUG")
    for data in (picture(), b"not a picture" * 50):
        url = data_url(data)
        for body in (
            {"messages": ask(image_part(data)), "image_url": url},
            {
                "messages": ask({"type": "image_url", "image_url": {"url": url, "detail": url}}),
                "image_url": {"url": url, url: 1},
            },
            {"messages": ask({"type": "input_video", "input_video": {"data": url[22:]}}), "video": url[22:]},
            {"messages": [{"role": url, "content": url}], "model": url},
            {"messages": url, "image_url": [url], "include": [url]},
        ):
            web.post(path, json=body)
            web.post(path, content=json.dumps(body)[:-1])
        assert base64.b64encode(data).decode()[:40] not in caplog.text
    assert f"POST {path} 400" in caplog.text
