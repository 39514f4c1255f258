"""One slot, the latest wins, whoever puts."""

import asyncio
import threading

import pytest

from mmserve.live.frame import Frame
from mmserve.live.mailbox import Mailbox


def frame(seq):
    return Frame(seq=seq, data=b"x", captured=float(seq), received=float(seq))


async def test_the_latest_is_taken_and_the_one_before_handed_back():
    box = Mailbox()
    assert box.put(frame(1)) is None
    assert box.put(frame(2)).seq == 1
    assert (await box.take()).seq == 2
    assert len(box) == 0


async def test_taking_waits_for_one():
    box = Mailbox()
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    box.put(frame(1))
    assert (await taking).seq == 1


async def test_waiting_has_an_end():
    box = Mailbox()
    assert await box.take(0.01) is None
    box.nudge()
    assert await box.take() is None


async def test_a_pause_leaves_what_comes_and_ends_when_nudged():
    box = Mailbox()
    pausing = asyncio.create_task(box.pause(60.0))
    await asyncio.sleep(0)
    box.put(frame(1))
    await asyncio.sleep(0.02)
    assert not pausing.done()
    box.nudge()
    await pausing
    assert (await box.take()).seq == 1


async def test_a_cancelled_wait_takes_nothing():
    box = Mailbox()
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    box.put(frame(1))
    assert (await box.take()).seq == 1


async def test_many_threads_put_and_every_frame_is_taken_or_handed_back_once():
    box, back, taken = Mailbox(), [], []
    threads = [
        threading.Thread(
            target=lambda start=start: back.extend(
                f.seq for i in range(300) if (f := box.put(frame(start + i))) is not None
            )
        )
        for start in (0, 1000, 2000)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or len(box):
        if (found := await box.take(0.01)) is not None:
            taken.append(found.seq)
    for thread in threads:
        thread.join()
    assert sorted(back + taken) == [start + i for start in (0, 1000, 2000) for i in range(300)]
