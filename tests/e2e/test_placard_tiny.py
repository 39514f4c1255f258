"""The placard with tiny-vl behind it, asked as its page asks: labels in their form, with true facts."""

import base64
import json
from contextlib import aclosing
from pathlib import Path

import httpx
import msgspec
import pytest
from live_server import serving

from mmserve.client import LiveClient
from mmserve.core.config import Config
from mmserve.demos.placard import labels
from mmserve.demos.placard.app import create_placard
from mmserve.demos.placard.counts import Counts
from mmserve.demos.placard.labels import Label
from mmserve.demos.placard.options import PlacardOptions
from mmserve.demos.placard.settings import Host
from mmserve.demos.placard.store import Store
from mmserve.models import tiny
from mmserve.service import Service

FIXED = {"maker": "Ada", "dimensions": "2 × 3 cm", "credit_line": "On loan from the present"}
SAMPLES = Path(tiny.__file__).parent / "samples"
SHOWN = {
    "cat.jpg": ("Cat on Green", ("cat", "green")),
    "apples.jpg": ("Three Apples on White", ("three apples", "white")),
    "circle-rabbit.jpg": ("Red Circle and Rabbit on Yellow", ("red circle", "rabbit", "yellow")),
    "photograph.jpg": ("Unknown", ("not known", "brown")),
}


@pytest.fixture(scope="module")
def service():
    service = Service.load(Config.of(drain_s=1))
    yield service
    service.close()


@pytest.fixture(scope="module")
def url(service, tmp_path_factory):
    options = PlacardOptions(folder=str(tmp_path_factory.mktemp("labels")))
    store = Store(options.path)
    store.prepare()
    host = Host(service.model_name, bundled=True)
    with serving(service, service.config, create_placard(options, store, host, Counts())) as url:
        yield url


@pytest.fixture(scope="module")
def web(url):
    with httpx.Client(base_url=url, timeout=60) as web:
        yield web


@pytest.fixture(scope="module")
def setup(web):
    return web.get("/placard/setup.json").json()


def asked(web, setup, image, question, schema=None):
    """What an upload's question is answered with."""
    picture = "data:image/jpeg;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
    body = {"model": setup["model"], "messages": [{"role": "user", "content": content}], "temperature": 0}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "label", "schema": schema}}
    return web.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def form_about(web, described):
    return web.post("/placard/form", json={"alt_text": described, "language": "en"}).json()["schema"]


def whole(setup, described, answer):
    """The label that a page makes of both answers, and of the lines that are fixed."""
    fixed = {name: setup[name] for name in ("maker", "dimensions", "credit_line")}
    return {**json.loads(answer), "alt_text": described, **fixed}


@pytest.mark.parametrize("name", SHOWN)
def test_a_label_of_an_upload_is_json_with_true_facts_and_can_be_kept(web, setup, name):
    image = (SAMPLES / name).read_bytes()
    described = asked(web, setup, image, setup["alt_question"])
    voice = next(each for each in setup["voices"] if each["id"] == setup["voice"])
    label = whole(setup, described, asked(web, setup, image, voice["question"], form_about(web, described)))
    msgspec.convert(label, Label)
    title, facts = SHOWN[name]
    assert label["title"] == title
    for fact in facts:
        assert fact in (label["text"] + label["alt_text"]).lower()
    answer = web.post(
        "/placard/labels",
        files={"image": (name, image, "image/jpeg")},
        data={"label": json.dumps(label), "voice": voice["id"], "language": setup["language"]},
    )
    assert answer.status_code == 201
    saved = answer.json()
    assert title in web.get("/placard/gallery").text
    assert label["alt_text"] in web.get(saved["url"]).text
    assert web.delete(saved["url"]).status_code == 204
    assert title not in web.get("/placard/gallery").text


async def test_a_camera_at_rest_is_the_signal_and_its_still_is_labelled_as_a_picture(url, web, setup):
    """As the page does it with tiny-vl, which takes frames of a camera for clips, in which things move."""
    assert setup["pictures"] is True
    policy = {
        "fps": 30,
        "window_items": 1,
        "memory": 0,
        "trigger": "still",
        "still_s": 0.1,
        "question": setup["alt_question"],
        "sampling": {"temperature": 0},
    }
    titles = []
    async with LiveClient(url, policy=policy, max_tokens=1) as camera, aclosing(camera.answers()) as answers:
        for name in ("cat.jpg", "apples.jpg"):
            still = (SAMPLES / name).read_bytes()
            for _ in range(3):
                camera.put(still)
            await (await anext(answers)).text()
            described = asked(web, setup, still, setup["alt_question"])
            form = form_about(web, described)
            titles.append(json.loads(asked(web, setup, still, setup["voices"][0]["question"], form))["title"])
    assert titles == ["Cat on Green", "Three Apples on White"]


async def test_a_camera_can_be_labelled_in_one_question_of_its_own(url):
    """As the page does it with other models: the standing question is answered in the form of a label."""
    policy = {
        "fps": 30,
        "window_items": 1,
        "memory": 0,
        "trigger": "still",
        "still_s": 0.1,
        "question": labels.QUESTION,
        "sampling": {"temperature": 0, "structured_outputs": {"json": labels.schema(FIXED)}},
    }
    async with (
        LiveClient(url, policy=policy, max_tokens=700) as camera,
        aclosing(camera.answers()) as answers,
    ):
        for _ in range(3):
            camera.put((SAMPLES / "cat.jpg").read_bytes())
        label = json.loads(await (await anext(answers)).text())
    msgspec.convert(label, Label)
    assert {name: label[name] for name in FIXED} == FIXED
    assert "green" in label["title"].lower() + label["text"].lower()
