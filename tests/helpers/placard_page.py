"""The placard's page in a browser, for tests: opened, looked at, waited for. MMSERVE_SHOTS=FOLDER keeps its
screenshots."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import numpy as np
from helpers import browser as helpers
from PIL import Image

from mmserve.models import tiny

SAMPLES = Path(next(iter(tiny.__path__))) / "samples"
SUBJECTS = {"cat": "cat.jpg", "apple": "apples.jpg", "rabbit": "circle-rabbit.jpg"}
FRAME = (384, 256)
SCENE_S = 3.5  # of each scene of a film
PATIENCE_S = 120.0
SIZES = {"phone": (390, 844), "laptop": (1280, 800), "wall": (1920, 1080)}
AXE = files("axe_core_python").joinpath("axe.min.js")

# Notes whatever hangs on the wall, and whether something always did from the first label on.
WATCH_THE_WALL = """
  window.seen = [];
  window.bare = 0;
  new MutationObserver(() => {
    const hanging = document.querySelector("#stack > .label:not(.leaving)");
    const words = (name) => hanging?.querySelector(name)?.textContent ?? "";
    if (!words(".title") && !words(".text")) window.bare += 1;
    if (hanging && !hanging.classList.contains("invites")) seen.push(`${words(".title")} ${words(".text")}`);
  }).observe(document.getElementById("stack"), { subtree: true, childList: true, characterData: true });
"""
NO_WEBRTC = "delete window.RTCPeerConnection; delete window.webkitRTCPeerConnection;"
# Websockets that a test can cut off and keep away.
CUT = """
  window.Plain = WebSocket;
  window.sockets = [];
  window.WebSocket = class extends Plain {
    constructor(url, ...rest) {
      super(window.away ? new URL("/nowhere", url) : url, ...rest);
      sockets.push(this);
    }
  };
"""


def picture(name):
    """A sample as a camera sees it, with its own ground around it. uint8 [H, W, 3]."""
    if name is None:
        return np.zeros((FRAME[1], FRAME[0], 3), np.uint8)
    with Image.open(SAMPLES / name) as image:
        image = image.convert("RGB")
        image.thumbnail(FRAME)
        whole = Image.new("RGB", FRAME, image.getpixel((4, 4)))
        whole.paste(image, ((FRAME[0] - image.width) // 2, (FRAME[1] - image.height) // 2))
    return np.asarray(whole)


@asynccontextmanager
async def opened(address, film=None, script=None):
    """A browser's page that has ``PATIENCE_S`` for everything."""
    async with helpers.browser(address, film, script) as page, asyncio.timeout(PATIENCE_S):
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await look_as(page, "laptop")
        yield page


async def look_as(page, size, light="light", width=None):
    """As a display of ``size``, which may be as narrow as ``width`` pixels."""
    usual, height = SIZES[size]
    width = width or usual
    sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    await page.call("Emulation.setDeviceMetricsOverride", **sizes)
    features = [{"name": "prefers-color-scheme", "value": light}]
    await page.call("Emulation.setEmulatedMedia", features=features)


async def settled(page):
    """Until nothing fades any more."""
    await page.evaluate("""Promise.allSettled(document.getAnimations()
        .filter((each) => Number.isFinite(each.effect.getComputedTiming().endTime))
        .map((each) => each.finished)).then(() => true)""")


async def shoot(page, place):
    await settled(page)
    shot = await page.call("Page.captureScreenshot", format="png")
    place.write_bytes(base64.b64decode(shot["data"]))


EVERY = tuple((size, light) for size in SIZES for light in ("light", "dark"))
SOME = (("phone", "dark"), ("laptop", "light"))


async def shoot_all(page, shots, name, ways=EVERY):
    """The page at each size, by day and in the evening."""
    for size, light in ways:
        await look_as(page, size, light)
        await asyncio.sleep(0.1)
        await shoot(page, shots / f"{name}-{size}-{light}.png")
    await look_as(page, "laptop")


async def check_access(page):
    """What axe-core has to say, with the contrast that labels are held to."""
    if not await page.evaluate("Boolean(window.axe)"):
        await page.evaluate(AXE.read_text(encoding="utf-8"))
    await settled(page)
    rules = json.dumps({"color-contrast-enhanced": {"enabled": True}})
    found = await page.evaluate(f"""axe.run({{ rules: {rules} }}).then(({{ violations }}) =>
        violations.map(({{ id, nodes }}) => [id, ...nodes.map((node) => node.html.slice(0, 150)
            + node.failureSummary)].join(" | ")))""")
    assert not found, "\n".join(found)


async def finished(page, word=""):
    """Until a finished label with ``word`` hangs there; its text."""
    return await page.until(f"""(() => {{
        const card = document.querySelector("#stack > .label.finished:not(.leaving):not(.invites)");
        return card && card.textContent.toLowerCase().includes("{word}") && card.innerText;
    }})()""")


async def state(page, *names):
    return await page.until(
        f"{json.dumps(names)}.includes(window.placard?.machine.state) && placard.machine.state"
    )


async def give_file(page, path):
    root = (await page.call("DOM.getDocument"))["root"]["nodeId"]
    node = (await page.call("DOM.querySelector", nodeId=root, selector="#file"))["nodeId"]
    await page.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)
