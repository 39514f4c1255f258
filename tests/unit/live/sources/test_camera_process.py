"""The process that waits for the next WebRTC client."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from mmserve.core.config import Config
from mmserve.live.sources.process import CameraProcess, Spare
from mmserve.processes.child import ChildDied

PATIENCE_S = 60.0  # for processes to start, on a busy machine


@asynccontextmanager
async def waiting_room():
    config = Config()
    spare = Spare(config.cameras, config.media, config.server.hang_timeout_s)
    try:
        yield spare
    finally:
        await spare.close()


async def test_a_client_that_leaves_early_takes_nothing_from_the_next_one():
    async with asyncio.timeout(PATIENCE_S), waiting_room() as spare:
        first = await spare.take()
        await first.end()  # before it was ready, which the next one waits for
        second = await spare.take()
        await second.child.ready()
        await second.end()


async def test_the_first_client_is_given_what_has_been_begun_before(monkeypatch):
    begun = []
    start = CameraProcess.start

    async def noted(*given):
        begun.append(await start(*given))
        return begun[-1]

    monkeypatch.setattr(CameraProcess, "start", noted)
    async with asyncio.timeout(PATIENCE_S), waiting_room() as spare:
        spare.begin()
        while not begun:
            await asyncio.sleep(0.01)
        [waiting] = begun
        await waiting.child.ready()
        spare.begin()
        process = await spare.take()
        assert process is waiting, "once is enough, and it is taken"
        await process.end()


async def test_who_waits_for_a_process_that_is_ended_is_told_so():
    async with asyncio.timeout(PATIENCE_S), waiting_room() as spare:
        process = await spare.take()
        ready = asyncio.create_task(process.child.ready())
        await asyncio.sleep(0)
        await process.end()
        with pytest.raises(ChildDied):
            await ready


async def test_a_server_that_stops_starts_no_process_first(monkeypatch):
    started = []
    start = CameraProcess.start

    async def noted(*given):
        started.append(given)
        return await start(*given)

    monkeypatch.setattr(CameraProcess, "start", noted)
    async with asyncio.timeout(PATIENCE_S):
        async with waiting_room() as spare:
            process = await spare.take()
        await process.end()
    assert len(started) == 1


async def test_what_keeps_one_process_from_starting_keeps_no_client_and_no_server(monkeypatch, caplog):
    start = CameraProcess.start

    async def fails(*given):
        monkeypatch.setattr(CameraProcess, "start", start)
        raise OSError("no more processes")

    async with asyncio.timeout(PATIENCE_S), waiting_room() as spare:
        first = await spare.take()
        monkeypatch.setattr(CameraProcess, "start", fails)
        await first.child.ready()
        second = await spare.take()
        assert "no more processes" in caplog.text
        monkeypatch.setattr(CameraProcess, "start", fails)
        await second.child.ready()
        await first.end()
        await second.end()
