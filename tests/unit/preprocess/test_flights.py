"""Work that is shared: begun once, ended for all, given up when nobody waits."""

import asyncio
import threading

import pytest

from mmserve.preprocess.flights import Flights


class Work:
    """Counts how often it was begun and given up, and ends when it is let."""

    def __init__(self, error=None):
        self.begun = self.given_up = 0
        self.gate = asyncio.Event()
        self.error = error

    async def __call__(self):
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.error:
            raise self.error
        return "result"


@pytest.fixture
def flights():
    return Flights()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def boarded(flights, work, count):
    tasks = [asyncio.create_task(flights.join(b"k", work)) for _ in range(count)]
    await settle()
    return tasks


async def test_all_who_wait_share_one_piece_of_work(flights):
    work = Work()
    tasks = await boarded(flights, work, 4)
    work.gate.set()
    assert await asyncio.gather(*tasks) == [("result", False)] + [("result", True)] * 3
    assert work.begun == 1
    assert flights.shared == 3
    assert len(flights) == 0


async def test_results_are_not_kept(flights):
    work = Work()
    work.gate.set()
    for _ in range(2):
        assert await flights.join(b"k", work) == ("result", False)
    assert work.begun == 2


async def test_the_one_who_began_may_leave(flights):
    work = Work()
    first, second = await boarded(flights, work, 2)
    first.cancel()
    await settle()
    assert first.cancelled()
    work.gate.set()
    assert await second == ("result", True)
    assert (work.begun, work.given_up) == (1, 0)


async def test_work_that_nobody_waits_for_is_given_up_and_begun_anew_by_the_next(flights):
    work = Work()
    tasks = await boarded(flights, work, 2)
    for task in tasks:
        task.cancel()
    await settle()
    assert (work.begun, work.given_up) == (1, 1)
    assert len(flights) == 0
    again = (await boarded(flights, work, 1))[0]
    work.gate.set()
    assert await again == ("result", False)


async def test_work_may_be_given_up_before_it_has_begun(flights):
    task = asyncio.create_task(flights.join(b"k", Work()))
    await asyncio.sleep(0)
    task.cancel()
    await settle()
    assert task.cancelled()
    assert len(flights) == 0


async def test_an_error_is_everybody_s_who_waits_and_nobody_s_who_comes_later(flights):
    work = Work(ValueError("broken"))
    tasks = await boarded(flights, work, 2)
    work.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in results] == ["broken", "broken"]
    work.error = None
    assert await flights.join(b"k", work) == ("result", False)


def test_callers_on_several_event_loops_share_work(flights):
    """The one who began it is on a loop that ends meanwhile: those on another begin it anew."""
    began, gone = threading.Event(), threading.Event()
    begun = []

    async def endless():
        begun.append("first")
        began.set()
        await asyncio.Event().wait()

    async def quick():
        begun.append("second")
        return "result"

    async def beginner():
        task = asyncio.create_task(flights.join(b"k", endless))
        await asyncio.to_thread(began.wait, 10)
        await asyncio.to_thread(gone.wait, 10)  # until the other waits; then this loop ends with its tasks
        assert not task.done()

    async def other():
        waiting = asyncio.create_task(flights.join(b"k", quick))
        while not flights.shared:
            await asyncio.sleep(0.001)
        gone.set()
        return await asyncio.wait_for(waiting, 10)

    thread = threading.Thread(target=lambda: asyncio.run(beginner()))
    thread.start()
    assert began.wait(10)
    assert asyncio.run(other()) == ("result", False)
    thread.join(10)
    assert begun == ["first", "second"]
    assert len(flights) == 0
