"""``mmserve serve`` with the bundled model as real processes, real signals and real pictures."""

import asyncio
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from helpers.pool_watch import children, gone, named_memory, until
from test_killed_processes import command

from mmserve.caption import caption_chat
from mmserve.cli import MISUSED
from mmserve.core.config import Config
from mmserve.generation import whole
from mmserve.media import media_part
from mmserve.service import Service

SAMPLES = Path(str(files("mmserve.models.tiny") / "samples"))
APPLES = (SAMPLES / "apples.jpg").read_bytes()


def begun(folder, *flags):
    """A server on its way, which logs to ``folder``."""
    command = [sys.executable, "-m", "mmserve.cli", "serve", "--port", "0", "--kv-cache-mib", "16", *flags]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"TMPDIR": str(folder)}
        )


def left_behind(folder):
    """What stands where temporary files go, beside the log."""
    return [path.name for path in folder.iterdir() if path.name.startswith("mmserve-ipc")]


class Server:
    """A server that is up, and what it has started."""

    def __init__(self, folder, *flags):
        self.folder, self.log = folder, folder / "log"
        self.process = begun(folder, *flags)
        line = self.process.stdout.readline()
        assert "ready at" in line, self.log.read_text()
        self.url = re.search(r"ready at (http://\S+)", line)[1]
        self.pid = self.process.pid

    def one(self, name):
        """The process id of its engine or detokenizer."""
        [pid] = [p for p in children(self.pid) if f"mmserve.processes.{name}" in command(p)]
        return pid

    @property
    def processes(self):
        return (self.pid, *children(self.pid))

    @property
    def left_behind(self):
        return left_behind(self.folder)

    def figure(self, name):
        found = re.search(rf"^mmserve_{name} (\S+)", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(found[1])

    def ready_now(self):
        return httpx.get(f"{self.url}/health/ready").is_success

    def ended(self):
        """Its exit status."""
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def serving(folder, *flags):
    server = Server(folder, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def folder():
    """A short path, since sockets stand in it."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as name:
        yield Path(name)


def question(tokens=4000, **fields):
    messages = [{"role": "user", "content": "Tell me a long story about apples."}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, **fields}


def client(server):
    return httpx.AsyncClient(base_url=server.url, timeout=120)


async def caption(web):
    answer = await web.post("/v1/captions", files={"image": APPLES})
    return answer.status_code, answer.json().get("caption"), answer.json().get("error", {}).get("code")


async def ready(web):
    async with asyncio.timeout(60):
        while not (await web.get("/health/ready")).is_success:
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def plain():
    """What is said of the picture with everything in one process."""
    service = Service.load(Config.of(kv_cache_mib=16))
    answer = asyncio.run(whole(service, caption_chat("r", media_part(APPLES, "apples.jpg"))))
    service.close()
    return answer.text.strip()


async def test_a_server_of_processes(folder, plain):
    """One server for all of it, since a server takes a while to start."""
    with serving(folder) as server:
        assert server.left_behind == [], "nobody needs the sockets' names once all are connected"
        assert "libtorch" not in maps(server.pid)
        assert "libtorch" not in maps(server.one("detokenizer"))
        assert "libtorch" in maps(server.one("engine"))
        assert [named_memory(pid) for pid in server.processes] == [[]] * 6
        async with client(server) as web:
            assert await caption(web) == (200, plain, None)
            await a_client_that_leaves_frees_its_pages(server, web)
            for name in ("engine", "detokenizer"):
                await a_killed_process_is_told_and_replaced(server, web, name)
                assert await caption(web) == (200, plain, None)
            assert server.figure("process_restarts_total") == 2
            await a_stopping_server_finishes_what_runs_and_refuses_who_comes(server, web)
        assert server.left_behind == []


def maps(pid):
    return Path(f"/proc/{pid}/maps").read_text()


async def a_client_that_leaves_frees_its_pages(server, web):
    async with web.stream("POST", "/v1/chat/completions", json=question(stream=True)) as stream:
        lines = stream.aiter_lines()  # kept: the stream is closed with it
        first = await anext(lines)
        assert (stream.status_code, first.startswith("data:")) == (200, True), first
        await until(lambda: server.figure("requests_running") == 1)
    await until(lambda: server.figure("requests_running") == 0)
    total, free, cached = (server.figure(f"kv_pages{which}") for which in ("", "_free", "_cached"))
    assert total == free + cached


async def a_killed_process_is_told_and_replaced(server, web, name):
    """Whole answers and a stream are under way."""
    doomed = [asyncio.create_task(web.post("/v1/chat/completions", json=question())) for _ in range(2)]
    stream = asyncio.create_task(web.post("/v1/chat/completions", json=question(stream=True)))
    await until(lambda: server.figure("requests_running") == 3)
    pid = server.one(name)
    os.kill(pid, signal.SIGKILL)
    for answer in await asyncio.gather(*doomed):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        assert f"the {name} process {pid} ended (killed by SIGKILL)" in answer.json()["error"]["message"]
    if name == "engine":
        assert (await web.get("/health/ready")).status_code == 503, "they hear of it long before it is back"
        status, _, code = await caption(web)
        assert (status, code) == (503, "engine_restarting")
    assert '"code":"engine_restarting"' in (await stream).text
    assert (await web.get("/health/live")).is_success
    await ready(web)
    assert gone(pid)
    assert len(server.processes) == 6
    assert server.left_behind == []


async def a_stopping_server_finishes_what_runs_and_refuses_who_comes(server, web):
    processes = server.processes
    async with web.stream("POST", "/v1/chat/completions", json=question(300, stream=True)) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        status, _, code = await caption(web)
        assert (status, code) == (503, "server_stopping")
        rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "data: [DONE]"
    assert server.ended() == 0
    await until(functools.partial(gone, *processes))
    assert "1 requests finished, 0 were cut off" in server.log.read_text()


async def test_a_killed_server_leaves_nothing(folder):
    with serving(folder) as server:
        async with client(server) as web:
            asking = asyncio.create_task(web.post("/v1/chat/completions", json=question()))
            await until(lambda: server.figure("requests_running") == 1)
            processes = server.processes
            os.kill(server.pid, signal.SIGKILL)
            await until(functools.partial(gone, *processes))
            await asyncio.gather(asking, return_exceptions=True)
        assert server.left_behind == []


async def test_a_server_that_is_killed_while_it_starts_leaves_nothing(folder):
    process = begun(folder)
    started = await until(lambda: [p for p in children(process.pid) if "mmserve.processes" in command(p)])
    await until(lambda: left_behind(folder))
    process.kill()
    await until(functools.partial(gone, *started))
    process.communicate()
    await until(lambda: not left_behind(folder))


async def test_too_many_deaths_end_the_server_with_the_reason(folder):
    with serving(folder) as server:
        async with client(server) as web:
            for _ in range(3):
                os.kill(server.one("detokenizer"), signal.SIGKILL)
                await until(lambda: not server.ready_now())
                await ready(web)
        processes = server.processes
        os.kill(server.one("detokenizer"), signal.SIGKILL)
        assert server.ended() == 1
        await until(functools.partial(gone, *processes))
        assert "the 4th such end within 10 minutes" in server.log.read_text().splitlines()[-1]
        assert server.left_behind == []


async def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(folder):
    process = begun(folder, "--max-model-len", "100000", "--kv-cache-mib", "1")
    process.communicate(timeout=60)
    assert process.returncode == MISUSED
    assert "max_model_len is 100000" in (folder / "log").read_text().splitlines()[-1]
    assert left_behind(folder) == []


async def test_one_process_serves_it_all_where_that_is_asked_for(folder, plain):
    with serving(folder, "--no-engine-process") as server:
        assert len(server.processes) == 4
        assert "libtorch" in maps(server.pid)
        async with client(server) as web:
            assert await caption(web) == (200, plain, None)
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 0


def test_starting_and_stopping_again_leaves_nothing_and_needs_no_workers(plain):
    """Without workers the pixels stand in this process alone, and are copied for the engine."""
    left = []
    for _ in range(3):
        service = Service.start(Config.of(kv_cache_mib=16, workers=0))
        answer = asyncio.run(whole(service, caption_chat("r", media_part(APPLES, "apples.jpg"))))
        service.close()
        assert answer.text.strip() == plain
        assert service.stats()["running"] == 0
        del service
        gc.collect()
        left.append(
            (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), children(os.getpid()))
        )
    assert left[1] == left[2]
    assert left[2][-1] == []
