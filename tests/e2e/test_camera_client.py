"""The Python client and ``mmserve camera`` against a server with tiny-vl."""

import asyncio
import io
import json
import socket
import sys
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import av
import numpy as np
import pytest
from live_server import serving
from PIL import Image

from mmserve.cli import main
from mmserve.client import LiveClient, LiveError
from mmserve.client.live import address
from mmserve.core.config import Config
from mmserve.models import tiny
from mmserve.service import Service

KEY = "k" * 20
SAMPLES = Path(tiny.__file__).parent / "samples"
DESCRIBE = "Describe this image."
GREEDY = {"fps": 30, "sampling": {"temperature": 0}}


def sample(name):
    return (SAMPLES / name).read_bytes()


@pytest.fixture(scope="module")
def service():
    service = Service.load(Config.of(api_key=KEY, drain_s=1))
    yield service
    service.close()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, service.config) as url:
        yield url


@pytest.fixture
def film(tmp_path):
    """A clip of a cat, four seconds long."""
    with Image.open(SAMPLES / "cat.jpg") as image:
        pixels = np.asarray(image.convert("RGB").resize((256, 256)))
    path = tmp_path / "cat.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 256, 256, "yuv420p"
        for _ in range(40):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


class Relay:
    """A way to the server that can be cut."""

    def __init__(self, url):
        self._port = int(url.rpartition(":")[2])
        self._writers = set()

    @asynccontextmanager
    async def open(self):
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()

    def cut(self):
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _take(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, back}
        await asyncio.gather(_pipe(reader, back), _pipe(there, writer), return_exceptions=True)


async def _pipe(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def text_of(pieces):
    return "".join([piece.text async for piece in pieces])


async def test_a_frame_is_asked_about_and_the_answer_tells_how_old_it_is(url):
    async with LiveClient(url, api_key=KEY, policy=GREEDY) as camera:
        seq = camera.put(sample("cat.jpg"))
        pieces = [piece async for piece in camera.ask(DESCRIBE)]
        assert "cat" in "".join(piece.text for piece in pieces)
        assert {piece.frame_seq for piece in pieces} == {seq}
        assert all(piece.age_ms > 0 for piece in pieces)
        assert [piece.finish for piece in pieces[-2:]] == [None, "stop"]
        assert pieces[-1].usage["input_token_details"]["cached_tokens"] > 0
    assert camera.fates == {"kept": 1}


async def test_a_question_may_come_before_the_first_frame(url):
    async with LiveClient(url, api_key=KEY, policy=GREEDY) as camera:
        answer = asyncio.create_task(text_of(camera.ask(DESCRIBE)))
        await asyncio.sleep(0.1)
        camera.put(sample("apples.jpg"))
        assert "apple" in await answer


async def test_an_answer_that_is_left_early_is_cancelled_and_a_newer_question_cuts_one(url, service):
    endless = {"fps": 30, "sampling": {"temperature": 0, "ignore_eos": True}}
    async with LiveClient(url, api_key=KEY, policy=endless) as camera:
        camera.put(sample("cat.jpg"))
        async with aclosing(camera.ask(DESCRIBE)) as pieces:
            await anext(pieces)
        first = camera.ask(DESCRIBE)
        await anext(first)
        second = camera.ask(DESCRIBE, max_tokens=3)
        ends = []
        for answer in (second, first):
            ends.append([piece.finish async for piece in answer][-1])
        assert ends == ["length", "cut"]


async def test_answers_that_a_change_starts_come_by_themselves(url):
    policy = {**GREEDY, "trigger": "change", "question": DESCRIBE, "window_items": 1}
    async with LiveClient(url, api_key=KEY, policy=policy) as camera, aclosing(camera.answers()) as answers:
        for name, thing in (("cat.jpg", "cat"), ("apples.jpg", "apple")):
            camera.put(sample(name))
            assert thing in await (await anext(answers)).text()


async def test_a_connection_that_is_cut_comes_back_and_sees_what_is_shown_then(url):
    relay = Relay(url)
    async with relay.open() as through, LiveClient(through, api_key=KEY, policy=GREEDY) as camera:
        camera.put(sample("cat.jpg"))
        assert "cat" in await text_of(camera.ask(DESCRIBE))
        endless = camera.ask(DESCRIBE, sampling={"ignore_eos": True})
        await anext(endless)
        relay.cut()
        with pytest.raises(LiveError) as caught:
            await text_of(endless)
        assert (caught.value.code, caught.value.closed) == ("connection_lost", 1006)
        camera.put(sample("apples.jpg"))
        assert "apple" in await text_of(camera.ask(DESCRIBE))
        assert camera.connections == 2


async def test_a_client_gives_up_where_nobody_comes_back(url):
    relay = Relay(url)
    async with relay.open() as through, LiveClient(through, api_key=KEY, give_up_s=0) as camera:
        camera.put(sample("cat.jpg"))
        await text_of(camera.ask(DESCRIBE))
        relay.cut()
        assert (await camera.ended()).closed == 1006
        with pytest.raises(LiveError):
            await text_of(camera.ask(DESCRIBE))


async def test_refusals_are_told_at_once(url):
    for given, said in (
        ({"api_key": "wrong"}, "key is not valid"),
        ({"api_key": KEY, "policy": {"no_such_field": 1}}, "no_such_field"),
        ({"api_key": KEY, "camera": "nobody"}, "nobody"),
    ):
        with pytest.raises(LiveError, match=said):
            async with LiveClient(url, **given):
                pass
    with pytest.raises(LiveError, match="cannot be reached"):
        async with LiveClient("http://127.0.0.1:1"):
            pass


async def test_the_policy_changes_while_a_camera_runs(url):
    async with LiveClient(url, api_key=KEY, policy=GREEDY) as camera:
        await camera.update({"window_items": 1}, instructions="Be brief.")
        with pytest.raises(LiveError, match="no_such_field"):
            await camera.update({"no_such_field": 1})
        camera.put(sample("cat.jpg"))
        assert "cat" in await text_of(camera.ask(DESCRIBE)), "what was refused changes nothing"


def test_addresses_of_servers_are_taken_in_every_usual_form():
    assert address("http://h:1/v1") == address("h:1") == address("ws://h:1/") == "ws://h:1/v1/realtime"
    assert address("https://h/below", camera="a b") == "wss://h/below/v1/realtime?camera=a+b"
    with pytest.raises(LiveError):
        address("ftp://h")


# ---------------------------------------------------------------- the command


def run_camera(url, *flags):
    return main(["camera", "--server", url, "--api-key", KEY, *flags])


def test_a_clip_is_asked_about_once(url, film, capsys):
    status = run_camera(url, "--file", str(film), "--loop", "--ask", DESCRIBE, "--json")
    shown = capsys.readouterr()
    assert status == 0, shown.err
    told = json.loads(shown.out)
    assert "cat" in told["text"]
    assert told["age_ms"] > 0
    assert told["frames"]["kept"] >= 1


def test_questions_are_read_line_by_line(url, film, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{DESCRIBE}\n\nWhat is it?\n"))
    assert run_camera(url, "--file", str(film), "--loop", "--max-tokens", "12") == 0
    shown = capsys.readouterr().out
    assert "cat" in shown
    assert shown.count(" ms old)") == 2


def test_answers_come_by_themselves_until_the_clip_ends(url, film, capsys):
    assert run_camera(url, "--file", str(film), "--ask", DESCRIBE, "--every", "0.3", "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers
    assert all("cat" in answer["text"] for answer in answers if answer["finish"] == "stop")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--file", "/nowhere.mp4", "--ask", "What?"], "/nowhere.mp4 cannot be read"),
        (["--device", "/dev/video999", "--ask", "What?"], "/dev/video999 cannot be read"),
        (["--loop"], "loop"),
    ],
)
def test_what_cannot_be_shown_is_said(url, flags, said, capsys):
    assert run_camera(url, *flags) != 0
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said(film, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert run_camera(f"http://127.0.0.1:{port}", "--file", str(film), "--ask", "What?") == 1
    assert "cannot be reached" in capsys.readouterr().err
