"""A realtime client's queue: what is sent, what may wait, and how it ends."""

import asyncio

import pytest
from starlette.websockets import WebSocketDisconnect

from mmserve.server import realtime_link
from mmserve.server.realtime_link import CLIENT_GONE, Inbox, Link, Rate


class Socket:
    """A client that reads when it is let."""

    def __init__(self, reading=True):
        self.sent, self.closed = [], None
        self.let = asyncio.Event()
        if reading:
            self.let.set()

    async def send_text(self, text):
        await self.let.wait()
        self.sent.append(text)

    async def receive(self):
        return {"type": "websocket.disconnect", "code": 1006}

    async def close(self, code, reason):
        self.closed = (code, reason)


async def written(link):
    task = asyncio.create_task(link.write())
    await asyncio.sleep(0)
    return task


async def test_events_leave_in_their_order():
    socket = Socket()
    link = Link(socket, 100)
    task = await written(link)
    for text in ("a", "b", "c"):
        link.send(text)
    await link.flushed()
    assert socket.sent == ["a", "b", "c"]
    task.cancel()


async def test_a_client_that_lets_too_much_wait_is_given_up_and_told_so():
    socket = Socket(reading=False)
    link = Link(socket, 2048)
    task = await written(link)
    link.send("x" * 1500)
    assert not link.ending.done()
    link.send("x" * 1500)
    ending = link.ending.result()
    assert (ending.code, "over 2 KiB" in ending.reason) == (1008, True)
    await link.flushed()  # nothing is waited for
    task.cancel()
    await link.close(ending)
    assert socket.closed == (ending.code, ending.reason)


async def test_echoes_do_not_count_but_nothing_is_heeded_while_they_wait():
    socket = Socket(reading=False)
    link = Link(socket, 100)
    task = await written(link)
    link.send("x" * 5000, echo=True)
    link.send("y" * 50)
    assert not link.ending.done()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await link.room()
    socket.let.set()
    await asyncio.wait_for(link.room(), 5)
    assert len(socket.sent[0]) == 5000
    task.cancel()


async def test_nothing_is_said_after_the_end():
    socket = Socket()
    link = Link(socket, 100)
    task = await written(link)
    link.end(1001, "the server is stopping")
    link.end(1011, "and then it failed")
    link.send("late")
    await link.flushed()
    assert (socket.sent, link.ending.result().code) == ([], 1001)
    task.cancel()


async def test_a_client_that_leaves_is_not_closed():
    socket = Socket()
    link = Link(socket, 100)
    assert [message async for message in link.messages()] == []
    ending = link.ending.result()
    assert ending.code == CLIENT_GONE
    await link.close(ending)
    assert socket.closed is None


async def test_a_client_that_leaves_while_it_is_written_to_ends_the_link():
    class Gone(Socket):
        async def send_text(self, text):
            raise WebSocketDisconnect(1006)

    link = Link(Gone(), 100)
    link.send("x")
    await asyncio.wait_for(link.write(), 5)
    assert link.ending.result().code == CLIENT_GONE


async def test_last_words_are_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(realtime_link, "LAST_WORDS_S", 0.02)
    link = Link(Socket(reading=False), 100)
    link.send("x")
    await asyncio.wait_for(link.flushed(), 5)


async def test_the_inbox_lets_in_what_it_has_room_for():
    inbox = Inbox(10)
    await inbox.put("x" * 9)
    await inbox.put("y" * 9)  # there was room when it came
    waiting = asyncio.create_task(inbox.put("z"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert await inbox.take() == "x" * 9
    await asyncio.wait_for(waiting, 5)
    assert [await inbox.take(), await inbox.take()] == ["y" * 9, "z"]
    assert not inbox


def test_a_rate_fills_up_again_with_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(realtime_link.time, "monotonic", lambda: now[0])
    rate = Rate(60)
    assert all(rate.take() for _ in range(60))
    assert not rate.take()
    assert (rate.remaining, rate.reset_s) == (0, 60.0)
    now[0] = 2.0
    assert (rate.remaining, rate.reset_s) == (2, 58.0)
    now[0] = 1000.0
    assert rate.remaining == 60
