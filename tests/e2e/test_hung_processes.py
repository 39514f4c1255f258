"""``mmserve serve`` when its processes are stopped but live: they are waited for, and then replaced."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

from helpers.pool_watch import gone, until
from test_processes import caption, client, question, ready, serving


async def test_a_process_that_hangs_is_told_and_replaced():
    """One server for all of it, since a server takes a while to start."""
    with (
        tempfile.TemporaryDirectory(prefix="e2e-") as folder,  # a short path, since sockets stand in it
        serving(Path(folder), "--hang-timeout-s", "3") as server,
    ):
        async with client(server) as web:
            before = await caption(web)
            assert before[0] == 200
            await one_that_goes_on_in_time_is_left_alone(server, web, "engine")
            assert await caption(web) == before
            assert server.figure("process_restarts_total") == 0
            for name in ("detokenizer", "engine"):
                await one_that_does_not_is_replaced(server, web, name)
                assert await caption(web) == before
            assert server.figure("process_restarts_total") == 2
        assert server.left_behind == []


async def one_that_goes_on_in_time_is_left_alone(server, web, name):
    pid = server.one(name)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: not server.ready_now())
    why = (await web.get("/health/ready")).json()["error"]["message"]
    os.kill(pid, signal.SIGCONT)
    assert f"the {name} process {pid} has given no sign of life for" in why
    await ready(web)
    assert server.one(name) == pid


async def one_that_does_not_is_replaced(server, web, name):
    """Who comes before it is known for lost is not sent away, and waits no longer than the others."""
    stream = asyncio.create_task(web.post("/v1/chat/completions", json=question(stream=True)))
    await until(lambda: server.figure("requests_running") == 1)
    pid = server.one(name)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: not server.ready_now())
    late = await web.post("/v1/chat/completions", json=question())
    assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_restarting")
    assert f"the {name} process {pid} ended" in late.json()["error"]["message"]
    assert "it gave no sign of life for 3 s" in late.json()["error"]["message"]
    assert '"code":"engine_restarting"' in (await stream).text
    await ready(web)
    assert gone(pid)
    assert len(server.processes) == 6
