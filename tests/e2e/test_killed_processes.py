"""``mmserve serve`` when its processes are killed: what was under way fails, the rest goes on."""

import asyncio
import base64
import functools
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import httpx
from helpers.media_files import picture_file
from helpers.pool_watch import at_work, children, gone, named_memory, until
from PIL import Image

SAMPLE = Path(str(files("mmserve.models.tiny") / "samples" / "apples.jpg")).read_bytes()


@contextmanager
def serving():
    """The bundled model behind two workers; its process id and URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mmserve.cli", "serve", "--port", "0", "--kv-cache-mib", "8"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, re.search(r"ready at (http://\S+)", process.stdout.readline())[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def workers_of(server):
    """Its workers: two that decode, and one that lays out prompts."""
    workers = [p for p in children(server.pid) if "preprocess.pool.worker" in command(p)]
    assert len(workers) == 3
    return workers


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def long_clip():
    """Frames that take minutes to decode."""
    frame = base64.b64encode(picture_file(Image.new("RGB", (3000, 3000)))).decode()
    url = "data:video/jpeg;base64," + ",".join([frame] * 400)
    part = {"type": "video_url", "video_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}


async def test_killed_processes():
    """One server for all of it, since a server takes a while to start."""
    with serving() as (server, url):
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await a_killed_worker_costs_the_request_it_was_at(client, server)
        workers = workers_of(server)
        assert [named_memory(pid) for pid in (server.pid, *workers)] == [[]] * 4
        os.kill(server.pid, signal.SIGKILL)
        await until(functools.partial(gone, server.pid, *workers))
    with serving() as (_, url):
        assert httpx.post(f"{url}/v1/captions", files={"image": SAMPLE}, timeout=120).is_success


async def a_killed_worker_costs_the_request_it_was_at(client, server):
    doomed = asyncio.create_task(client.post("/v1/chat/completions", json=long_clip()))
    pid = await at_work(*workers_of(server))
    others = [
        asyncio.create_task(client.post("/v1/captions", files={"image": SAMPLE + bytes(i)})) for i in range(6)
    ]
    os.kill(pid, signal.SIGKILL)
    answer = await doomed
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "worker_lost")
    assert error["param"] == "messages[0].content[0].video_url"
    assert [answer.status_code for answer in await asyncio.gather(*others)] == [200] * 6
    await until(lambda: len(children(server.pid)) == 5)  # the engine and the detokenizer too
    assert (await client.get("/health/ready")).is_success
    metrics = (await client.get("/metrics")).text
    assert re.search(r"^mmserve_workers_lost_total 1", metrics, re.MULTILINE)
