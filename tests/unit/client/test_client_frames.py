"""Frames as the client sends them: the server reads what it writes, and none ever waits behind another."""

import asyncio
import time

import pytest

from mmserve.client import frames
from mmserve.client.frames import Slot, Unknown, message
from mmserve.server.realtime_frames import FrameReader


def test_the_server_reads_number_picture_and_time():
    reader = FrameReader(headers=True)
    captured = time.monotonic() - 0.5
    frame = reader.read(message(b"picture", 7, captured, synced=True))
    assert (frame.seq, frame.data) == (7, b"picture")
    assert frame.captured == pytest.approx(captured, abs=0.05)


def test_without_equal_clocks_the_fastest_frame_took_no_time():
    reader = FrameReader(headers=True)
    for seq, delay in ((1, 0.0), (2, 0.25)):
        frame = reader.read(message(b"", seq, time.monotonic() - delay))
        assert frame.received - frame.captured == pytest.approx(delay, abs=0.05)


async def test_a_newer_frame_takes_the_place_of_one_that_has_not_left():
    slot = Slot()
    assert not slot.put(b"old")
    assert slot.put(b"new")
    assert await slot.take() == b"new"
    late = asyncio.create_task(slot.take())
    await asyncio.sleep(0)
    slot.put(b"next")
    assert await late == b"next"


async def test_no_more_is_sent_than_the_server_tells_of():
    unknown = Unknown()
    for _ in range(frames.MOST_UNKNOWN):
        await unknown.room()
        unknown.sent()
    waiting = asyncio.create_task(unknown.room())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    unknown.told()
    await asyncio.wait_for(waiting, 5)


async def test_a_server_that_tells_nothing_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr(frames, "UNTOLD_S", 0.01)
    unknown = Unknown()
    for _ in range(frames.MOST_UNKNOWN):
        unknown.sent()
    await asyncio.wait_for(unknown.room(), 5)
