"""A camera in a realtime session: what it holds of answers that come by themselves, and faults."""

import asyncio

import pytest
from helpers.cameras import FakeSession

from mmserve.core.messages import Usage
from mmserve.live.session import Failed, Piece, Spoken, Triggered
from mmserve.server.realtime_eye import Eye
from mmserve.server.realtime_settings import Settings


class Teller:
    def tell(self, kind, **fields):
        pass


class Camera:
    """One that somebody else feeds."""

    def __init__(self, events):
        self.session = FakeSession(None, None, "me")
        self.session.events = events
        self.ended, self.why = asyncio.Event(), ""


def piece(text, finish=None):
    return Piece(text=text, finish_reason=finish, usage=Usage(), age_ms=1.0, frame_seq=1)


ENDS = [
    Spoken(answer=1, piece=piece("", "stop")),
    Failed(answer=1, error={"message": "it failed", "code": "generation_failed"}),
]


@pytest.mark.parametrize("end", ENDS)
async def test_an_answer_that_nobody_reads_is_not_held_beyond_its_end(end):
    told = asyncio.Event()

    async def events():
        yield Triggered(answer=1, cause="change")
        yield Spoken(answer=1, piece=piece("red"))
        yield end
        told.set()
        await asyncio.Event().wait()

    answers = []
    eye = Eye(Teller(), Settings, answers.append, lambda code, reason: None)
    eye.attach(Camera(events))
    async with asyncio.timeout(5):
        await told.wait()
    assert len(answers) == 1  # and it is never begun, as when it is cancelled while it waits for its turn
    assert eye._answers == {}
    await eye.close()


async def test_an_answer_that_has_ended_can_still_be_read():
    told = asyncio.Event()

    async def events():
        yield Triggered(answer=1, cause="change")
        yield Spoken(answer=1, piece=piece("red"))
        yield ENDS[0]
        told.set()
        await asyncio.Event().wait()

    answers = []
    eye = Eye(Teller(), Settings, answers.append, lambda code, reason: None)
    eye.attach(Camera(events))
    async with asyncio.timeout(5):
        await told.wait()
        said = [one async for one in answers[0]]
    assert [one.finish for one in said] == [None, "stop"]
    await eye.close()


async def test_a_fault_in_watching_ends_the_client_and_stands_in_the_log(caplog):
    async def events():
        raise RuntimeError("a fault of ours")
        yield

    ended = asyncio.get_running_loop().create_future()
    eye = Eye(Teller(), Settings, lambda answer: None, lambda *end: ended.set_result(end))
    eye.attach(Camera(events))
    async with asyncio.timeout(5):
        assert await ended == (1011, "the server failed; its log has the cause")
    assert "a fault of ours" in caplog.text
    await eye.close()
