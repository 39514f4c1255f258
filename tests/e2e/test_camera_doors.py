"""The bundled model says what cameras show that are pulled, uploaded, or come by WebRTC."""

import asyncio
import io
import json
import time
from contextlib import contextmanager
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
from helpers.camera_clients import KEY, Square, Upload, part, publisher
from helpers.cameras import until
from helpers.realtime_client import joined, text_of
from live_server import serving
from PIL import Image

from mmserve.core.config import Config
from mmserve.models import tiny
from mmserve.service import Service

SAMPLES = Path(tiny.__file__).parent / "samples"
DESCRIBE = "Describe this image."
POLICY = {"fps": 5, "heartbeat_s": 1, "max_frame_age_ms": 60_000}
QUERY = "&".join(f"{name}={value}" for name, value in POLICY.items())


def sample(name):
    with Image.open(SAMPLES / name) as picture:
        return np.asarray(picture.convert("RGB").resize((256, 256)))


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A folder with a clip of two seconds of a cat."""
    folder = tmp_path_factory.mktemp("media")
    with av.open(str(folder / "cat.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "10"})
        stream.height, stream.width, stream.pix_fmt = 256, 256, "yuv420p"
        for _ in range(20):
            frame = av.VideoFrame.from_ndarray(sample("cat.jpg"), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return folder


@pytest.fixture(scope="module")
def url(media):
    config = Config.of(
        api_key=KEY,
        pull_cameras=True,
        media_root=str(media),
        webrtc_hosts="127.0.0.1",
        webrtc_private=True,
        camera_connect_s=60.0,
    )
    service = Service.load(config)
    with serving(service, config) as url:
        yield url
    service.close()


@pytest.fixture
async def web(url):
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as web:
        yield web


async def kept(web, name):
    """When a frame has gone into the context of the camera."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        session = (await web.get(f"/v1/cameras/{name}")).json().get("session", {})
        if session.get("kept") or session.get("frames", {}).get("kept"):
            return session
        await asyncio.sleep(0.1)
    raise AssertionError(session)


async def answer(url, name, question=DESCRIBE):
    """What is said about a camera over /v1/realtime."""
    async with joined(
        url, f"?camera={name}", additional_headers={"authorization": f"Bearer {KEY}"}
    ) as client:
        settings = {"mmserve": {"sampling": {"temperature": 0}}}
        await client.send({"type": "session.update", "session": settings})
        await client.until("session.updated")
        await client.send({"type": "response.create", "response": {"instructions": question}})
        return text_of(await client.until("response.done"))


async def test_a_file_that_is_pulled_is_seen(url, web, media):
    body = {"url": f"file://{media}/cat.mp4", "loop": True, "name": "file", "policy": POLICY}
    assert (await web.post("/v1/cameras", json=body)).status_code == 201
    await kept(web, "file")
    assert "cat" in await answer(url, "file")
    assert (await web.delete("/v1/cameras/file")).status_code == 200


@contextmanager
def uploading(url, pictures):
    """An upload of a picture again and again; ``pictures`` may be changed at any time."""
    with Upload(url, f"?name=upload&{QUERY}") as upload:

        async def feed():
            while True:
                out = io.BytesIO()
                Image.fromarray(pictures[0]).save(out, "JPEG", quality=92)
                await asyncio.to_thread(upload.send, part(out.getvalue()))
                await asyncio.sleep(0.1)

        task = asyncio.create_task(feed())
        yield upload
        task.cancel()


async def test_an_upload_is_seen_and_so_is_a_change_of_its_scene(url, web):
    pictures = [sample("cat.jpg")]
    with uploading(url, pictures):
        await kept(web, "upload")
        assert "cat" in await answer(url, "upload")
        pictures[0] = sample("apples.jpg")
        end = time.monotonic() + 60
        while "apple" not in (said := await answer(url, "upload")):
            assert time.monotonic() < end, said


class Picture(Square):
    """A picture that stands still."""

    def __init__(self, pixels):
        super().__init__(pixels.shape[:2], 10)
        self.pixels = pixels

    async def recv(self):
        frame = await super().recv()
        shown = av.VideoFrame.from_ndarray(self.pixels, format="rgb24").reformat(format="yuv420p")
        shown.pts, shown.time_base = frame.pts, frame.time_base
        return shown


async def test_a_whip_camera_is_seen_and_asked_over_its_data_channel(url):
    track = Picture(sample("apples.jpg"))
    async with publisher(url, track=track) as camera:
        made = await camera.publish(f"?name=whip&{QUERY}")
        assert made.status_code == 201, made.text
        await kept(camera.web, "whip")

        def send(kind, **fields):
            camera.channel.send(json.dumps({"type": kind, **fields}))

        def heard(kind):
            return [event for event in map(json.loads, camera.heard) if event["type"] == kind]

        assert await until(lambda: heard("session.created"))
        send("session.update", session={"mmserve": {"sampling": {"temperature": 0}}})
        assert await until(lambda: heard("session.updated"))
        send("response.create", response={"instructions": DESCRIBE})
        assert await until(lambda: heard("response.done"), 60)
        assert "apple" in heard("response.output_text.done")[0]["text"]
        assert "apple" in await answer(url, "whip")
