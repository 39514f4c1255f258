"""A headless Chromium whose camera shows what a test has drawn, driven by its DevTools protocol."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from websockets.asyncio.client import connect

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--allow-loopback-in-peer-connection",
)
CHROMIUM = os.environ.get("MMSERVE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
START_S, END_S, ANSWER_S = 60.0, 20.0, 5.0

needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on the path nor in MMSERVE_CHROMIUM; apt-get install -y chromium brings it",
)


class PageError(Exception):
    """What a page's script has thrown."""


class Page:
    """The one tab of a browser."""

    def __init__(self, devtools, session):
        self._devtools, self._session = devtools, session
        self._numbers = itertools.count(1)

    async def call(self, method, **params):
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": params}
        order |= {"sessionId": self._session} if self._session else {}
        await self._devtools.send(json.dumps(order))
        while (said := json.loads(await self._devtools.recv())).get("id") != number:
            pass
        if "error" in said:
            raise PageError(said["error"]["message"])
        return said["result"]

    async def evaluate(self, expression):
        """The value of ``expression``, a promise's when it is there. PageError for what it throws."""
        said = await self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in said:
            thrown = said["exceptionDetails"].get("exception", {})
            raise PageError(thrown.get("description") or str(said["exceptionDetails"]))
        return said["result"].get("value")

    async def until(self, expression, every_s=0.05):
        """The value of ``expression`` as soon as it is true, on this page or one that takes its place."""
        while True:
            with suppress(TimeoutError):  # what is asked of a page while it is left may find no answer
                async with asyncio.timeout(ANSWER_S):
                    if value := await self.evaluate(expression):
                        return value
            await asyncio.sleep(every_s)

    async def go(self, address):
        """Return when the page at ``address`` is there, with its scripts."""
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def press(self, key):
        """Press a key: a character, or the name of one such as Tab."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}.get(key) or ord(key.upper())
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        name = "Space" if key == " " else key if len(key) > 1 else f"Key{key.upper()}"
        what = {"key": key, "windowsVirtualKeyCode": code, "code": name}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **what)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **what)


@asynccontextmanager
async def browser(address, film=None, script=None):
    """A page at ``address``; its camera shows ``film`` (a .y4m file) again and again, or Chromium's own test
    picture. ``script`` runs before those of each page."""
    flags = [*FLAGS, *([f"--use-file-for-fake-video-capture={film}"] if film else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S):
                port, path = await _told(Path(folder) / "DevToolsActivePort")
            async with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as devtools:
                async with asyncio.timeout(START_S):
                    page = Page(devtools, await _tab(Page(devtools, None)))
                    if script is not None:
                        await page.call("Page.enable")
                        await page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
                    await page.go(address)
                yield page
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _told(place):
    """Where a browser listens, which it writes down."""
    while not (place.exists() and "/" in place.read_text()):
        await asyncio.sleep(0.05)
    return place.read_text().split()


async def _tab(whole):
    while True:
        for target in (await whole.call("Target.getTargets"))["targetInfos"]:
            if target["type"] == "page":
                found = await whole.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
                return found["sessionId"]
        await asyncio.sleep(0.05)


def y4m(path, pictures, each, rate=10):
    """A film at ``path``: each of ``pictures`` uint8 RGB [H, W, 3] for ``each`` frames."""
    height, width = pictures[0].shape[:2]
    with path.open("wb") as file:
        file.write(f"YUV4MPEG2 W{width} H{height} F{rate}:1 Ip A1:1 C420jpeg\n".encode())
        for picture in pictures:
            planes = b"".join(plane.tobytes() for plane in _yuv(picture))
            for _ in range(each):
                file.write(b"FRAME\n" + planes)
    return path


def _yuv(picture):
    """The planes of a picture: full brightness, colours at half size (BT.601, limited range)."""
    red, green, blue = np.moveaxis(picture.astype(np.float64), -1, 0)
    luma = 16 + 0.257 * red + 0.504 * green + 0.098 * blue
    first = 128 - 0.148 * red - 0.291 * green + 0.439 * blue
    second = 128 + 0.439 * red - 0.368 * green - 0.071 * blue
    return [np.rint(plane).astype(np.uint8) for plane in (luma, _halved(first), _halved(second))]


def _halved(plane):
    return plane.reshape(plane.shape[0] // 2, 2, plane.shape[1] // 2, 2).mean((1, 3))
