"""How the requests of a load are sent: so many at once, at random moments, or beside a stream that talks."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import httpx

from mmserve.bench.client import Trace, chat
from mmserve.bench.workload import Workload

BEGUN = 8  # pieces of a stream that must have come before others disturb it
POLL_S = 0.002


@dataclass(frozen=True)
class Load:
    """``requests`` of ``workload``, at most ``concurrency`` of them under way (None: no bound), each sent as
    soon as it may or, with a ``rate``, at the moments of a Poisson process of that many a second."""

    workload: Workload
    requests: int = 1
    concurrency: int | None = 1
    rate: float | None = None

    async def send(self, client: httpx.AsyncClient, url: str, bodies: Sequence[bytes], seed: int) -> "Run":
        """Send ``bodies`` and wait for all of them."""
        moments = _moments(len(bodies), self.rate, seed)
        gate = asyncio.Semaphore(self.concurrency or len(bodies))
        began = time.perf_counter()

        async def one(body: bytes, moment: float) -> Trace:
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            async with gate:
                return await chat(client, url, body)

        traces = await asyncio.gather(*(one(b, m) for b, m in zip(bodies, moments, strict=True)))
        return Run(traces, max(t.ended for t in traces) - began)


@dataclass(frozen=True)
class Run:
    """What came of one load; ``wall`` seconds from its first request to its last answer."""

    traces: Sequence[Trace]
    wall: float


def scenarios(shape: Workload) -> dict[str, Load]:
    """The presets of the project's table, with requests of ``shape``."""
    pictures = replace(shape, images="distinct")
    same = replace(shape, images="same")
    return {
        "single": Load(pictures),
        "text": Load(replace(shape, images="none", clip_seconds=0)),
        "c8": Load(pictures, 8, 8),
        "c8same": Load(same, 8, 8),
        "c8warm": Load(same, 8, 8),  # what c8same sent, once more
    }


@dataclass(frozen=True)
class Disturbed:
    """A stream alone, its gaps in seconds while pictures were answered, and those answers. ``covered``: it
    talked for as long as they took, so that no gap is missing."""

    alone: Trace
    gaps: Sequence[float]
    pictures: Run
    covered: bool


async def beside_a_stream(
    client: httpx.AsyncClient, url: str, alone: bytes, stream: bytes, pictures: Sequence[bytes]
) -> Disturbed:
    """What ``pictures`` that arrive at once do to a stream that talks: ``alone`` is read first, by itself;
    then, while ``stream`` talks, they are sent. What is left of it when they are answered is given up."""
    quiet = await chat(client, url, alone)
    trace = Trace(0.0)
    talking = asyncio.create_task(chat(client, url, stream, trace))
    try:
        while len(trace.pieces) < BEGUN and not talking.done():
            await asyncio.sleep(POLL_S)
        run = await Load(Workload(), len(pictures), None).send(client, url, pictures, 0)
        covered = not talking.done()
    finally:
        talking.cancel()
        with suppress(asyncio.CancelledError):
            await talking
    first, last = min(t.sent for t in run.traces), max(t.ended for t in run.traces)
    gaps = [gap for gap, at in zip(trace.gaps, trace.pieces[1:], strict=True) if first <= at <= last]
    return Disturbed(quiet, gaps, run, covered)


def _moments(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the beginning at which each request is sent."""
    if rate is None:
        return [0.0] * count
    choose, moments, now = random.Random(seed), [], 0.0
    for _ in range(count):
        moments.append(now)
        now += choose.expovariate(rate)
    return moments
