"""Good and bad items at once against the whole server: each gets its own answer, and memory stays flat.

``pytest -m slow tests/e2e/test_media_soak.py -s`` runs the long form and prints the memory of every process.
"""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

SAMPLES = Path(str(files("mmserve.models.tiny") / "samples"))
AT_ONCE = 32
SAMPLED_EVERY = 100
SETTLED = 200  # items until caches are full and every code path has run
GROWTH = 0.15  # of a process's memory after that, for noise of the allocator
SPARE_MIB = 24


@dataclass(frozen=True)
class Item:
    name: str
    data: bytes
    caption: str | None  # None: it must be refused


@pytest.fixture(scope="module")
def server():
    """``mmserve serve`` with the bundled model; its process id and URL."""
    flags = ["--port", "0", "--kv-cache-mib", "8", "--encoder-cache-mib", "8", "--max-running", "16"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mmserve.cli", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        yield process.pid, re.search(r"ready at (http://\S+)", process.stdout.readline())[1]
    finally:
        process.terminate()
        process.wait(60)


def items(count):
    """As many items, no two of equal bytes, one in three bad; the same ones every time."""
    rng = np.random.default_rng(7)
    told = {s["file"]: s["caption"] for s in json.loads((SAMPLES / "samples.json").read_text())}
    pictures = [(Image.open(SAMPLES / name), told[name]) for name in ("apples.jpg", "tea.jpg", "village.jpg")]
    clip = (SAMPLES / "rocket.mp4").read_bytes()
    for number in range(count):
        image, caption = pictures[number % len(pictures)]
        good = encoded(speckled(image, rng), ("PNG", "JPEG", "WEBP")[number % 3])
        if number % 3 != 2:
            yield Item(f"picture {number}", good, caption)
        elif number % 15 == 2:
            yield Item(f"clip {number}", clip + clip_pad(number), told["rocket.mp4"])
        else:
            yield Item(f"bad {number}", damaged(rng, good, number), None)


def speckled(image, rng):
    """The picture with one pixel changed: a new picture to every cache, the same to the eye."""
    array = np.asarray(image.convert("RGB")).copy()
    array[0, rng.integers(array.shape[1])] ^= rng.integers(1, 8, 3, dtype=np.uint8)
    return Image.fromarray(array)


def encoded(image, kind):
    file = io.BytesIO()
    image.save(file, kind, **({"lossless": True} if kind == "WEBP" else {"quality": 95}))
    return file.getvalue()


def clip_pad(number):
    """A box that players skip, so that each clip has bytes of its own."""
    return (16).to_bytes(4, "big") + b"free" + number.to_bytes(8, "big")


def damaged(rng, good, number):
    """Cut short, of another kind, empty of pixels, or beyond a limit."""
    return (
        good[: len(good) // 3],
        b"%PDF-1.7 " + bytes([number % 256]) * 40,
        rng.bytes(400),
        huge_png(),
        b"GIF89a" + bytes(20),
    )[number % 5]


def huge_png():
    """A header that promises 30,000 x 30,000 pixels."""
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (30000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0" + bytes(4)


async def ask(client, item):
    """None if the answer is what it must be, else what was wrong with it."""
    answer = await client.post("/v1/captions", files={"image": (item.name, item.data)})
    body = answer.json()
    if item.caption is not None:
        said = body.get("caption")
        return None if answer.status_code == 200 and said == item.caption else f"{item.name}: {body}"
    error = body.get("error", {})
    clear = 400 <= answer.status_code < 500 and error.get("param") == "image" and error.get("message")
    return None if clear else f"{item.name}: {answer.status_code} {body}"


async def soak(url, pid, count):
    """What went wrong, and the memory in MiB of every process after each SAMPLED_EVERY items."""
    wrong, memory, waiting = [], [], iter(items(count))
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for start in range(0, count, SAMPLED_EVERY):
            share = [item for _, item in zip(range(min(SAMPLED_EVERY, count - start)), waiting, strict=False)]
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(item, gate=gate):
                async with gate:
                    return await ask(client, item)

            wrong += [fault for fault in await asyncio.gather(*map(one, share)) if fault]
            memory.append({p: resident(p) for p in family(pid)})
    return wrong, memory


def family(pid):
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = Path(f"/proc/{pid}/task").iterdir()
    found = {int(c) for t in threads for c in (t / "children").read_text().split()} | set(map(int, children))
    return [pid, *sorted(found)]


def resident(pid):
    """Private memory in MiB; what is shared (the arena) is counted by the server's own gauge."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024


def test_mixed_items_at_once_each_get_their_own_answer(server):
    pid, url = server
    wrong, _ = asyncio.run(soak(url, pid, 90))
    assert wrong == []
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    assert re.search(r"^mmserve_workers 3", metrics, re.M)


@pytest.mark.slow
def test_a_thousand_mixed_items_leave_memory_flat(server):
    pid, url = server
    wrong, memory = asyncio.run(soak(url, pid, 1000))
    assert wrong == []
    for number, sizes in enumerate(memory, 1):
        print(f"after {number * SAMPLED_EVERY}: " + ", ".join(f"{p}: {m:.0f} MiB" for p, m in sizes.items()))
    settled, last = memory[SETTLED // SAMPLED_EVERY - 1], memory[-1]
    assert settled.keys() == last.keys(), "a process was replaced"
    for process, before in settled.items():
        assert last[process] <= before * (1 + GROWTH) + SPARE_MIB, f"process {process} grew"
