import asyncio

import pytest

from mmserve.server.attend import attended
from mmserve.server.errors import ClientGone


async def stays():
    await asyncio.Event().wait()


async def leaves():
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


async def test_the_result_when_the_client_stays():
    async def work():
        return 7

    assert await attended(stays, work()) == 7


async def test_work_has_ended_when_the_client_is_gone():
    ended = []

    async def work():
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(ClientGone):
        await attended(leaves, work())
    assert ended == [True]


async def test_an_error_of_the_work_is_the_error():
    async def work():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await attended(stays, work())


async def test_cancelling_the_waiter_ends_the_work():
    ended = []

    async def work():
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(True)

    task = asyncio.create_task(attended(stays, work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
