"""The client for browsers in a real one: a camera by websocket and by WebRTC, asked about with tiny-vl."""

import asyncio
import json
import re

import numpy as np
import pytest
from helpers.browser import browser, needs_browser, y4m
from live_server import serving
from PIL import Image

from mmserve.core.config import Config
from mmserve.models import tiny
from mmserve.service import Service

pytestmark = needs_browser

KEY = "k" * 20
SIDE = 256
SCENE_S = 3  # for each of two scenes of the camera, in turn
PATIENCE_S = 60.0
SAMPLES = {"cat": "cat.jpg", "apple": "apples.jpg"}

# Asks again and again, until each of `wanted` stood in an answer; the answers, and what they were told with.
UNTIL_SEEN = """
async function untilSeen(camera, wanted) {
  const found = [];
  const missing = new Set(wanted);
  while (missing.size) {
    let text = "", age = null, seq = null;
    for await (const piece of camera.ask("Describe this image.")) {
      text += piece.text;
      age ??= piece.ageMs;
      seq ??= piece.frameSeq;
    }
    found.push({ text, age, seq });
    for (const thing of [...missing]) if (text.includes(thing)) missing.delete(thing);
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    def picture(name):
        with Image.open(f"{next(iter(tiny.__path__))}/samples/{name}") as image:
            return np.asarray(image.convert("RGB").resize((SIDE, SIDE)))

    pictures = [picture(name) for name in SAMPLES.values()]
    return y4m(tmp_path_factory.mktemp("film") / "scenes.y4m", pictures, each=10 * SCENE_S)


@pytest.fixture(scope="module")
def server():
    config = Config.of(api_key=KEY, webrtc_hosts="127.0.0.1", webrtc_private=True, drain_s=1)
    service = Service.load(config)
    with serving(service, config) as url:
        yield service, url
    service.close()


async def in_page(url, film, script, **given):
    """What ``script``, the body of an async function in a page of the server's, comes to."""
    async with browser(f"{url}/static/live.html", film) as page, asyncio.timeout(PATIENCE_S):
        return await page.evaluate(f"""(async (given) => {{
            const {{ LiveCamera, LiveError, publish }} = await import("/static/live.js");
            {UNTIL_SEEN}
            const stream = await navigator.mediaDevices.getUserMedia({{ video: true }});
            {script}
        }})({json.dumps({"key": KEY, **given})})""")


async def test_a_camera_by_websocket_is_seen_its_next_scene_too_and_after_a_lost_connection(server, film):
    _, url = server
    script = """
        const camera = new LiveCamera({
          key: given.key,
          policy: { fps: 5, window_items: 1, memory: 0, sampling: { temperature: 0 } },
        });
        await camera.open();
        camera.show(stream, { fps: 10 });
        const answers = await untilSeen(camera, given.wanted);
        const again = new Promise((resolve) => camera.addEventListener("open", resolve, { once: true }));
        camera._socket.close();
        await again;
        answers.push(...await untilSeen(camera, given.wanted.slice(0, 1)));
        camera.close();
        const after = await camera.ask("Anything?").next().catch((error) => error.code);
        return { answers, fates: camera.fates, after };
    """
    told = await in_page(url, film, script, wanted=list(SAMPLES))
    assert all(answer["age"] > 0 and answer["seq"] >= 1 for answer in told["answers"])
    assert told["fates"]["kept"] >= 2
    assert told["fates"]["unchanged"] >= 1, "most frames show what the one before did"
    assert told["after"] == "closed"


async def test_a_camera_by_webrtc_is_asked_about_over_its_data_channel(server, film):
    _, url = server
    script = """
        const camera = await publish(stream, {
          key: given.key,
          name: "browser",
          policy: { fps: 5, window_items: 1, memory: 0 },
          settings: { sampling: { temperature: 0 } },
        });
        const answers = await untilSeen(camera, given.wanted);
        const id = camera.id;
        await camera.close();
        return { answers, id };
    """
    told = await in_page(url, film, script, wanted=list(SAMPLES))
    assert told["id"].startswith("camera-")
    assert all(answer["age"] > 0 for answer in told["answers"])


async def test_an_answer_that_a_change_started_is_cancelled_by_leaving_it(server, film):
    _, url = server
    script = """
        const camera = new LiveCamera({
          key: given.key,
          policy: { fps: 5, trigger: "change", question: "Describe it.", sampling: { ignore_eos: true } },
        });
        await camera.open();
        const done = new Promise((resolve) => camera.addEventListener("event", ({ detail }) => {
          if (detail.type === "response.done") resolve(detail.response);
        }));
        const begun = new Promise((resolve) => camera.addEventListener("answer", resolve, { once: true }));
        camera.show(stream, { fps: 10 });
        for await (const piece of (await begun).detail) if (piece.text) break;
        const { status, status_details } = await done;
        camera.close();
        return [status, status_details.reason];
    """
    assert await in_page(url, film, script) == ["cancelled", "client_cancelled"]


async def test_refusals_reach_the_page_with_their_reason(server, film):
    _, url = server
    script = """
        const told = ({ message, code, closed }) => ({ message, code, closed });
        const failed = async (made) => made.then(() => null, told);
        const wrong = new LiveCamera({ key: "wrong" });
        const unknown = new LiveCamera({ key: given.key, policy: { no_such_field: 1 } });
        return [
          await failed(wrong.open()),
          await failed(unknown.open()),
          await failed(publish(stream, { key: "wrong" })),
        ];
    """
    wrong, unknown, sent = await in_page(url, film, script)
    assert wrong["closed"] == 4401
    assert "no_such_field" in unknown["message"]
    assert sent["code"] == "invalid_api_key"


async def test_the_page_that_comes_with_it_asks_about_its_camera(server, film):
    _, url = server
    async with browser(f"{url}/static/live.html", film) as page, asyncio.timeout(PATIENCE_S):
        await page.evaluate(f"document.querySelector('input[name=key]').value = '{KEY}'")
        await page.evaluate("document.querySelector('#start button').click()")
        while await page.evaluate("document.querySelector('#ask button').disabled"):
            await asyncio.sleep(0.1)
        await page.evaluate("document.querySelector('#ask button').click()")
        while (state := await page.evaluate("document.getElementById('state').textContent")) == "watching":
            await asyncio.sleep(0.1)
        assert re.fullmatch(r"what it saw was \d+ ms old", state)
        assert await page.evaluate("document.getElementById('answer').textContent")
