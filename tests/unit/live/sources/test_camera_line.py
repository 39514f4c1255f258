"""What the api believes of a camera's process."""

import asyncio
import socket

import numpy as np
import pytest

from mmserve.core.errors import MediaError
from mmserve.core.wire import PREFIX_BYTES, Fault
from mmserve.live.policy import SessionPolicy
from mmserve.live.sources import messages
from mmserve.live.sources.line import MOST_WAITING, Line
from mmserve.live.sources.messages import (
    MOST_BYTES,
    Answered,
    Away,
    Drop,
    Ended,
    Heard,
    Live,
    Opened,
    Picture,
    Say,
    Tally,
    Trickle,
    Watch,
    to_bytes,
)

LUMA = np.arange(12, dtype=np.uint8).reshape(3, 4)


@pytest.fixture
async def ends():
    """(the api's line, the process's socket)."""
    ours, theirs = socket.socketpair()
    line = Line(ours, 100)
    theirs.setblocking(False)
    yield line, theirs
    line.close()
    theirs.close()


async def said(ends, data):
    line, theirs = ends
    await asyncio.get_running_loop().sock_sendall(theirs, data)
    async with asyncio.timeout(5):
        return await line.receive()


@pytest.mark.parametrize(
    "message",
    [
        Answered("v=0"),
        Live("h264"),
        Away("why"),
        Tally(3, {"late": Drop(2, 9, 1.5)}),
        Opened(),
        Heard("text"),
        Ended("why", Fault.of(MediaError("broken", param="url"))),
    ],
)
async def test_words_arrive_as_they_were_said(ends, message):
    assert await said(ends, to_bytes(message)) == (message, None)


@pytest.mark.parametrize("message", [Watch(SessionPolicy(fps=3)), Say("text"), Trickle(("1 1 udp", "x"))])
async def test_words_to_a_camera_do_too(ends, message):
    line, theirs = ends
    assert line.say(message)
    data = b""
    async with asyncio.timeout(5):
        while len(data) < len(to_bytes(message)):
            data += await asyncio.get_running_loop().sock_recv(theirs, 4096)
    assert messages.to_camera(data[PREFIX_BYTES:]) == message


async def test_a_picture_comes_with_its_pixels(ends):
    picture = Picture(7, 1.0, 2.0, LUMA, 5, 20)
    got, pixels = await said(ends, to_bytes(picture) + bytes(range(256))[:200] + bytes(100))
    assert (got.seq, got.captured, got.received) == (7, 1.0, 2.0)
    assert np.array_equal(got.luma, LUMA)
    assert pixels.shape == (5, 20, 3)
    assert pixels.reshape(-1)[:200].tolist() == list(range(200))


@pytest.mark.parametrize(
    "data",
    [
        (MOST_BYTES + 1).to_bytes(4, "little"),
        b"\x01\x00\x00\x00\xff",
        to_bytes({"type": "Nonsense"}),
        to_bytes(Picture(1, 0.0, 0.0, LUMA, 11, 10)),
        to_bytes(Picture(1, 0.0, 0.0, LUMA, -1, -100)),
        to_bytes(Picture(1, 0.0, 0.0, LUMA, 0, 5)),
        to_bytes(Picture(1, 0.0, 0.0, LUMA.astype(np.float64), 5, 5)),
        to_bytes(Picture(1, 0.0, 0.0, LUMA[0], 5, 5)),
        to_bytes(Tally(1, {"no such fate": Drop(1, 1, 1.0)})),
    ],
)
async def test_what_no_camera_would_say_is_an_error(ends, data):
    with pytest.raises(ValueError):  # noqa: PT011
        await said(ends, data)


async def test_the_end_of_the_process_is_the_end_of_the_line(ends):
    line, theirs = ends
    theirs.close()
    with pytest.raises(EOFError):
        await line.receive()


async def test_who_does_not_read_is_told_no_more(ends):
    line, _ = ends
    sent = 0
    while line.say(Say("x" * 100_000)) and sent < 10_000:
        sent += 1
        await asyncio.sleep(0)
    assert sent <= 2 * MOST_WAITING
