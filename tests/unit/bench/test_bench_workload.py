"""The requests of a load: from a seed, and as they are asked for."""

import base64
import io
import json

import pytest
from PIL import Image

from mmserve.bench.load import Load, _moments, scenarios
from mmserve.bench.serve import BESIDE, Plan
from mmserve.bench.workload import Workload
from mmserve.commands.bench_serve import SCENARIOS

SMALL = Workload(width=48, height=32, text_words=5, max_tokens=7)


def content(body):
    [message] = json.loads(body)["messages"]
    return message["content"]


def pictures(body):
    return [p["image_url"]["url"] for p in content(body) if p["type"] == "image_url"]


def opened(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_distinct_requests_share_neither_picture_nor_words_and_come_again_from_their_seed():
    bodies = SMALL.bodies("m", 4, seed=3)
    assert len({pictures(b)[0] for b in bodies}) == len({content(b)[-1]["text"] for b in bodies}) == 4
    assert bodies == SMALL.bodies("m", 4, seed=3)
    assert not set(bodies) & set(SMALL.bodies("m", 4, seed=4))


def test_same_requests_are_equal_to_the_byte():
    same = Workload(images="same", width=48, height=32)
    assert len(set(same.bodies("m", 4, seed=3))) == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_have_the_size_and_format_asked_for(kind):
    shape = Workload(width=48, height=32, image_format=kind, images_per_request=2)
    urls = pictures(shape.body("m", 1))
    assert [url.partition(";")[0] for url in urls] == [f"data:image/{kind.lower()}"] * 2
    assert [(image.size, image.format) for image in map(opened, urls)] == [((48, 32), kind)] * 2
    assert urls[0] != urls[1]


def test_a_body_says_what_was_asked_for_and_no_more():
    body = json.loads(SMALL.body("m", 1))
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("m", 7, True)
    assert len(content(SMALL.body("m", 1))[-1]["text"].split()) == 5
    assert "ignore_eos" not in json.loads(Workload(images="none", ignore_eos=False).body("m", 1))


def test_clips_come_beside_pictures():
    shape = Workload(images="none", width=48, height=32, clip_seconds=1)
    [clip, _] = content(shape.body("m", 1))
    assert clip["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_poisson_moments_have_the_rate_asked_for():
    moments = _moments(4000, 20.0, seed=1)
    assert moments == sorted(moments)
    assert 4000 / moments[-1] == pytest.approx(20, rel=0.1)
    assert _moments(3, None, seed=1) == [0.0] * 3


def test_the_presets_are_those_that_the_command_names():
    assert (*scenarios(SMALL), BESIDE) == SCENARIOS


def test_only_the_warm_scenario_finds_pictures_that_were_sent_before():
    plan = Plan(SMALL, {name: Load(SMALL) for name in SCENARIOS[:-1]}, beside=True, seed=5)
    seeds = [plan.seed_of(name, number) for number in range(3) for name in (*SCENARIOS, "warm-up")]
    assert plan.seed_of("c8warm", 1) == plan.seed_of("c8same", 1)
    assert len(set(seeds)) == len(seeds) - 3
