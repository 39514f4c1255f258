"""Pruned clips through every door, with the bundled model behind."""

import base64

import httpx
import numpy as np
import pytest
from helpers.media_files import picture_file
from live_server import serving

from mmserve import LLM, SamplingParams
from mmserve.core.config import Config
from mmserve.service import Service

FRAMES = np.repeat(np.random.default_rng(0).integers(60, 90, (1, 96, 96, 3), np.uint8), 12, 0)
for number, shown in enumerate(FRAMES):
    shown[4:28, 4 + 5 * number : 28 + 5 * number] = (250, 40, 40)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def web():
    service = Service.load(Config.of(kv_cache_mib=32, workers=1, threads=2, video_pruning_rate=0.3))
    with serving(service, service.config) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    service.close()


def clip(**options):
    files = [base64.b64encode(picture_file(shown)).decode() for shown in FRAMES]
    return {"type": "video_url", "video_url": "data:video/jpeg;base64," + ",".join(files), **options}


def ask(web, part, **fields):
    content = [part, {"type": "text", "text": "What moves?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "include": ["media"],
        **fields,
    }
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def told(answer):
    """(vision tokens, those left out), which are the same in the usage and in what was seen."""
    (seen,) = answer["media"]
    assert answer["usage"]["prompt_tokens_details"]["video_tokens"] == seen["tokens"]
    return seen["tokens"], seen["dropped_tokens"]


def test_the_nearest_rate_holds_and_what_was_left_out_is_told(web):
    whole = told(ask(web, clip(video_pruning_rate=0)))
    assert whole[1] == 0
    configured, half = told(ask(web, clip())), told(ask(web, clip(video_pruning_rate=0.6)))
    in_request = told(ask(web, clip(), mm_processor_kwargs={"video_pruning_rate": 0.6}))
    assert configured[0] + configured[1] == half[0] + half[1] == whole[0]
    assert whole[0] > configured[0] > half[0] >= 0.4 * whole[0]
    assert in_request == half
    assert told(ask(web, clip(), mm_processor_kwargs={"video_pruning_rate": 0})) == whole


def test_a_stored_clip_tells_what_it_will_cost(web):
    body = {"video_url": clip()["video_url"], "video_pruning_rate": 0.6}
    media = web.post("/v1/media", json=body).json()
    answer = ask(web, {"type": "media", "media_id": media["id"]})
    assert (media["tokens"], media["dropped_tokens"]) == told(answer)


def test_two_rates_are_two_answers_of_the_cache_and_each_its_own(web):
    first = [ask(web, clip(video_pruning_rate=rate)) for rate in (0.2, 0.9)]
    again = [ask(web, clip(video_pruning_rate=rate)) for rate in (0.2, 0.9)]
    assert [told(a) for a in first] == [told(a) for a in again]
    assert told(first[0]) != told(first[1])
    assert all(a["media"][0]["cached"] for a in again)
    texts = [[a["choices"][0]["message"]["content"] for a in answers] for answers in (first, again)]
    assert texts[0] == texts[1]


def test_offline_too():
    def chat(rate):
        part = {"type": "video", "video": FRAMES, "fps": 4.0, "video_pruning_rate": rate}
        return [{"role": "user", "content": [part, {"type": "text", "text": "What moves?"}]}]

    with LLM(dtype="float32") as llm:
        whole, pruned = llm.chat([chat(0.0), chat(0.9)], GREEDY)
        alone = llm.chat(chat(0.9), GREEDY)[0]
    assert pruned.usage.video_tokens < 0.6 * whole.usage.video_tokens
    assert pruned.usage.prompt_tokens - pruned.usage.video_tokens == (
        whole.usage.prompt_tokens - whole.usage.video_tokens
    )
    assert alone.text == pruned.text
