"""The whole path over a real socket: preprocessing, engine and REST service, with a small random model."""

import base64
import json
import random
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
from msgspec import structs

from mmserve.core.config import Config
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import CarryOver, ChatInput, ImagePart, Message, SamplingParams, TextPart
from mmserve.service import Service

SMALL = {
    "load_format": "dummy",
    "dtype": "float32",
    "served_model_name": "dummy",
    "kv_cache_mib": 64,
}


@pytest.fixture(scope="module", params=["load", "start"], ids=["one process", "processes"])
def service(request, tmp_path_factory):
    """With everything in this process, and with engine and detokenizer as processes: no test can tell."""
    folder = write_dummy_model(tmp_path_factory.mktemp("dummy"))
    service = getattr(Service, request.param)(Config.of(model=str(folder), **SMALL))
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


def unowned(stats):
    return stats["kv_pages_free"] + stats["kv_pages_cached"]


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
    counts = [(u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in (last.usage, whole.usage)]
    assert counts[0] == counts[1]
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
    assert until(lambda: unowned(service.stats()) == unowned(before))


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
    gif = clip_file(6, kind="gif", codec="gif")
    for field, data, kind in (
        ("image", picture(3), "image_tokens"),
        ("image", clip_file(12), "video_tokens"),
        ("image", gif, "image_tokens"),
        ("video", gif, "video_tokens"),
    ):
        answer = httpx.post(f"{url}/v1/captions", files={field: data}, data={"max_tokens": "5"}, timeout=30)
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] <= 5
        assert usage["prompt_tokens_details"][kind] > 0


# ---------------------------------------------------------------- nonsense

FIELDS = (
    *("n", "stream", "stream_options", "max_completion_tokens", "logprobs", "top_logprobs", "temperature"),
    *("top_p", "top_k", "seed", "stop", "stop_token_ids", "min_tokens", "logit_bias", "presence_penalty"),
    *("chat_template_kwargs", "mm_processor_kwargs", "priority", "cache_salt", "tools", "model"),
)
ODD = (
    *(None, True, 0, -1, 1.5, 10**30, "", "\x00", "<|image_pad|>", "<|im_end|>", [], {}, [None], [[[]]]),
    *({"1": 1}, {"url": 3}, "data:", "data:,", "http://", "https://[::1", "file:///etc/passwd"),
)
KINDS = ("text", "image_url", "video_url", "image", "video", "sound")


def odd_part(chance):
    kind = chance.choice(KINDS)
    part = {"type": kind, kind: chance.choice([data_url(picture(size=(40, 40))), "Hello", *ODD])}
    extra = chance.choice(["min_pixels", "max_pixels", "fps", "num_frames", "timestamps", "detail"])
    return part | ({extra: chance.choice(ODD)} if chance.random() < 0.3 else {})


def odd_message(chance):
    content = chance.choice(
        ["Hello", [odd_part(chance) for _ in range(chance.randrange(3))], chance.choice(ODD)]
    )
    return {"role": chance.choice(["user", "user", "assistant", "system", "tool", *ODD]), "content": content}


def test_nonsense_is_never_a_fault(url, service):
    chance = random.Random(0)
    with httpx.Client(base_url=url, timeout=30) as web:
        for _ in range(60):
            body = {"messages": [odd_message(chance) for _ in range(chance.randrange(1, 3))], "max_tokens": 2}
            body |= {name: chance.choice(ODD) for name in chance.sample(FIELDS, chance.randrange(3))}
            answer = web.post("/v1/chat/completions", json=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            assert "server_error" not in answer.text, (body, answer.text)
    assert until(lambda: service.stats()["running"] == 0)


def test_a_bad_picture_among_good_ones_is_the_only_one_to_fail(client):
    broken = {"type": "image_url", "image_url": {"url": data_url(picture()[:500])}}

    def outcome(part):
        try:
            return said(ask(client, part, text("Hello"))) is not None
        except openai.BadRequestError as error:
            return error.param

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(outcome, [image(1), broken, image(2), image(3), broken, image(4)]))
    bad = "messages[0].content[0].image_url"
    assert outcomes == [True, bad, True, True, bad, True]


def test_a_client_that_leaves_while_its_picture_is_fetched_starts_nothing(service):
    """The picture's host accepts the connection and never answers."""
    config = Config.of(allow_private_urls=True, **SMALL)
    with socket.create_server(("127.0.0.1", 0)) as host, serving(service, config) as url:
        address = f"http://127.0.0.1:{host.getsockname()[1]}/x.png"
        part = {"type": "image_url", "image_url": {"url": address}}
        requests = service.stats()["requests"]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": [part]}]},
                timeout=0.5,
            )
        peer, _ = host.accept()
        with peer:
            peer.settimeout(2)
            while peer.recv(4096):
                pass
        assert service.stats()["requests"] - requests <= 1  # the probe picture of this second server


def complete(url, prompt, **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_prompts_are_told_their_log_probabilities(url):
    """In vLLM's shape, for each prompt; the answers to one prompt are told the same."""
    choices = complete(url, ["a cat and a dog", "x"], n=2, prompt_logprobs=2)
    for pair in (choices[:2], choices[2:]):
        first, *others = pair[0]["prompt_logprobs"]
        assert first is None
        assert pair[1]["prompt_logprobs"] == [first, *others]
        for position in others:
            assert 2 <= len(position) <= 3
            assert {entry["rank"] for entry in position.values()} >= {1, 2}
    chat = {"messages": [{"role": "user", "content": [image(), text("what?")]}], "prompt_logprobs": 0, "n": 2}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**chat, "max_tokens": 2}, timeout=60).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(position) == 1 for position in answer["prompt_logprobs"][1:])


def test_an_echo_with_log_probabilities_begins_with_the_prompts(url):
    """As OpenAI's older endpoint has it, whole and as a stream; lm-eval reads it so."""
    prompt = "a cat and a dog"
    [whole] = complete(url, prompt, echo=True, logprobs=2)
    told = whole["logprobs"]
    assert whole["text"].startswith(prompt)
    count = len(told["tokens"]) - 4
    assert "".join(told["tokens"][:count]) == prompt
    assert (told["token_logprobs"][0], told["top_logprobs"][0], told["text_offset"][0]) == (None, None, 0)
    assert all(value <= 0 for value in told["token_logprobs"][1:])
    assert all(len(top) >= 2 for top in told["top_logprobs"][1:])
    assert [len("".join(told["tokens"][:i])) for i in range(count)] == told["text_offset"][:count]
    assert told["text_offset"][count] == len(prompt)
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 2,
    }
    parts = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["logprobs"])
    joined = [value for part in parts if part for value in part["token_logprobs"]]
    assert joined[1:] == pytest.approx(told["token_logprobs"][1:], abs=1e-4)
    assert [token for part in parts if part for token in part["tokens"]] == told["tokens"]


def test_forbidden_words_and_shown_ends_over_rest(url, service):
    letters = service.tokenize("b") + service.tokenize("c")
    [either] = complete(url, "a cat", allowed_token_ids=letters)
    said = either["text"][0]
    [other] = complete(url, "a cat", allowed_token_ids=letters, bad_words=[said])
    assert {said, other["text"][0]} == {"b", "c"}
    assert len(set(other["text"])) == 1
    [only] = complete(url, "a cat", allowed_token_ids=service.tokenize("b"))
    assert only["text"] == "bbbb"
    [ended] = complete(url, "a cat", allowed_token_ids=service.tokenize("b"), stop=["bb"])
    [shown] = complete(
        url, "a cat", allowed_token_ids=service.tokenize("b"), stop=["bb"], include_stop_str_in_output=True
    )
    assert (ended["text"], shown["text"]) == ("", "bb")
    end = service.tokenize("<|im_end|>")
    for fields, expected in (({}, ""), ({"skip_special_tokens": False}, "<|im_end|>" * 4)):
        [answer] = complete(url, "a cat", allowed_token_ids=end, **fields)
        assert answer["text"] == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 21),
        ("bad_words", "word"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**7]),
        ("use_beam_search", True),
        ("best_of", 3),
        ("echo", True),
        ("reasoning_effort", "high"),
        ("logprob_token_ids", [1]),
    ],
)
def test_what_a_chat_cannot_have_is_a_400_that_names_it(url, field, value):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, field: value}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_context_is_warmed_asked_about_and_carried_over(service):
    """What a live session does, in one process and in several."""
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    message = Message("user", (ImagePart(data=picture(seed=77)), TextPart("What is it?")))
    chat = ChatInput(request_id="asks", messages=(message,), sampling=sampling)
    whole = (await service._desk.prepare(chat)).request
    engine, pages = service._engine, whole.num_tokens // 16 * 16
    [warmed] = await said_to(engine, structs.replace(whole, request_id="warm", warm=True))
    assert (warmed.piece.finish_reason, warmed.piece.token_ids) == ("stop", ())
    order = CarryOver(keys=whole.radix_keys, kept=((0, whole.num_tokens),), new_salt="its own")
    assert await engine.carry_over(order) == pages
    answers = [await said_to(engine, structs.replace(whole, cache_salt=salt)) for salt in (None, "its own")]
    texts = ["".join(one.piece.text for one in said if one.piece) for said in answers]
    assert texts[0] == texts[1]
    assert [said[-1].piece.usage.cached_tokens for said in answers] == [pages, pages]
    with pytest.raises(InvalidRequest) as error:
        await engine.carry_over(structs.replace(order, kept=((5, 4),)))
    assert error.value.param == "kept"
    assert engine.stats()["warmed"] == 1
    assert engine.stats()["carried_tokens"] == pages


async def said_to(engine, request):
    async def again(wanted):
        raise AssertionError("no pixels were wanted")

    return [said async for said in engine.answer(request, again)]
