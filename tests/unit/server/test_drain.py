"""The end of a server: who is inside may finish, and nobody else is let in."""

import asyncio

import pytest

from mmserve.server.drain import Drain
from mmserve.server.errors import Stopping


async def visit(drain, until):
    with drain.inside():
        await until.wait()


async def begun(drain, *events):
    tasks = [asyncio.create_task(visit(drain, event)) for event in events]
    await asyncio.sleep(0)
    return tasks


async def test_who_is_inside_may_finish_and_who_comes_is_refused(caplog):
    caplog.set_level("INFO")
    drain, done = Drain(), asyncio.Event()
    drain.check()
    tasks = await begun(drain, done, done)
    draining = asyncio.create_task(drain.run(60))
    await asyncio.sleep(0)
    with pytest.raises(Stopping) as caught:
        drain.check()
    assert (caught.value.status, caught.value.code) == (503, "server_stopping")
    assert not draining.done()
    done.set()
    await draining
    assert all(task.exception() is None for task in tasks)
    assert "2 requests finished, 0 were cut off" in caplog.text


async def test_who_is_left_in_the_end_is_cut_off_and_counted(caplog):
    caplog.set_level("INFO")
    drain, done = Drain(), asyncio.Event()
    quick, slow = await begun(drain, done, asyncio.Event())
    draining = asyncio.create_task(drain.run(0.05))
    await asyncio.sleep(0)
    done.set()
    await draining
    assert slow.cancelled()
    assert quick.exception() is None
    assert "1 requests finished, 1 were cut off" in caplog.text


async def test_with_nobody_inside_there_is_nothing_to_wait_for():
    await asyncio.wait_for(Drain().run(60), 5)


async def test_who_would_stay_as_long_as_it_may_is_told_that_the_end_begins():
    drain, done = Drain(), asyncio.Event()
    with drain.telling(done.set):
        [staying] = await begun(drain, done)
        await asyncio.wait_for(drain.run(60), 5)
    assert staying.exception() is None
