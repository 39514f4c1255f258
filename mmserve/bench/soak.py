"""A soak: mixed traffic for a long time, and then: was anything wrong, lost or left behind?"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from mmserve.bench.client import first_model
from mmserve.bench.soak_traffic import Different, Refused, Traffic
from mmserve.bench.soak_watch import Memory, busy, did, figures, never
from mmserve.bench.summary import percentile
from mmserve.core.errors import ConfigError

ANSWER_S = 120.0  # an answer that takes longer is lost
SETTLE_S = 60.0  # until the last request has left the server
MOST_SAMPLES, EVERY_S = 60, 60.0
JUDGED_S = 180.0  # before that, memory is still on its way to where it stays
PAUSE_S = 0.05  # after a fault, lest a server that is gone be asked without end
KEPT = 5  # faults of a kind that are told in full


@dataclass(frozen=True)
class Plan:
    """``seconds`` of traffic from ``concurrency`` callers. ``overload``: being refused for want of room is no
    fault. ``equality``: answers about known samples must be the first ones."""

    seconds: float
    concurrency: int = 16
    seed: int = 0
    overload: bool = False
    equality: bool = True


@dataclass
class Count:
    """What became of the requests of one kind: how many failed, gave another answer than before, or were
    refused for want of room; ``seconds`` of those that went well; ``told``, the first few wrong ones."""

    faults: int = 0
    different: int = 0
    refused: int = 0
    seconds: list[float] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return self.faults + self.different

    @property
    def requests(self) -> int:
        return self.wrong + self.refused + len(self.seconds)


@dataclass
class Report:
    """All that was seen. ``rises``: counters that must not rise; ``left``: what did not come to rest."""

    counts: dict[str, Count]
    memory: Memory
    seconds: float
    rises: dict[str, float]
    left: dict[str, float]
    ready: bool
    did: dict[str, float]
    log_faults: int | None = None

    def checks(self, plan: Plan) -> list[dict[str, Any]]:
        """One line for each thing that must hold, and whether it does."""
        faults = {kind: count.faults for kind, count in self.counts.items() if count.faults}
        different = sum(count.different for count in self.counts.values())
        refused = sum(count.refused for count in self.counts.values())
        grown = [line["process"] for line in self.memory.table() if not line["flat"]]
        lines = [
            _check("requests were answered as they must be", not faults, _told(faults)),
            _check("known answers stayed the same", not (plan.equality and different), str(different or "")),
            _check("nobody was refused for want of room", plan.overload or not refused, str(refused or "")),
            _check("nothing was left in the server", not self.left, _told(self.left)),
            _check("no process was lost or restarted", not self.rises, _told(self.rises)),
            _check("it is ready afterwards", self.ready, ""),
            _check("memory is flat", not grown, ", ".join(grown)),
        ]
        if self.seconds < JUDGED_S or not self.memory.samples:
            lines[-1] |= {
                "verdict": "not judged",
                "found": f"judged from {JUDGED_S:.0f} s on, where --pid is known",
            }
        if self.log_faults is not None:
            lines.append(_check("its log tells no error", not self.log_faults, str(self.log_faults or "")))
        return lines

    def table(self) -> list[dict[str, Any]]:
        """One line for each kind of request."""
        return [
            {
                "kind": kind,
                "requests": count.requests,
                "faults": count.wrong,
                "refused": count.refused,
                "p50 ms": _ms(count.seconds, 50),
                "p99 ms": _ms(count.seconds, 99),
            }
            for kind, count in self.counts.items()
        ]


def passed(checks: list[dict[str, Any]]) -> bool:
    return not any(line["verdict"] == "FAILED" for line in checks)


async def soak(base_url: str, pid: int | None, plan: Plan, told: Callable[[str], None]) -> Report:
    """Send traffic for as long as planned, or until ctrl-C. ConfigError for a server that does not answer."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.concurrency)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=ANSWER_S) as client:
        traffic = Traffic(client, await _model(client, base_url), plan.seed)
        await traffic.learn()
        before = await _figures(client)
        run = _Run(traffic, plan, Memory(pid), told)
        await run.drive()
        left = await _settled(client)
        ready = await _ready(client)
        run.memory.sample()
        after = await _figures(client)
        return Report(
            counts=run.counts,
            memory=run.memory,
            seconds=run.seconds,
            rises=never(before, after),
            left=left,
            ready=ready,
            did=did(before, after),
        )


class _Run:
    """The storm itself."""

    def __init__(self, traffic: Traffic, plan: Plan, memory: Memory, told: Callable[[str], None]) -> None:
        self.traffic, self.plan, self.memory, self.told = traffic, plan, memory, told
        self.counts = {kind: Count() for kind in traffic.kinds}
        self.seconds = 0.0
        self._stop = asyncio.Event()

    async def drive(self) -> None:
        started = time.perf_counter()
        with _stopped_by_ctrl_c(self._stop):
            known = len(self.traffic.references)
            self.told(f"{known} answers are known; {self.plan.seconds:.0f} s of traffic begin")
            callers = [asyncio.create_task(self._call()) for _ in range(self.plan.concurrency)]
            watch = asyncio.create_task(self._watch())
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self.plan.seconds)
                self._stop.set()
                await asyncio.gather(*callers)
            finally:
                for task in (*callers, watch):
                    task.cancel()
                await asyncio.gather(*callers, watch, return_exceptions=True)
        self.seconds = time.perf_counter() - started

    async def _call(self) -> None:
        """One caller: a request after the other."""
        while not self._stop.is_set():
            kind, send = self.traffic.next()
            count, start = self.counts[kind], time.perf_counter()
            try:
                await send()
            except Refused:
                count.refused += 1
            except Different as error:
                count.different += 1
                self._complain(kind, str(error))
            except Exception as error:  # whatever it is, it is the server's fault or says that it is gone
                count.faults += 1
                self._complain(kind, f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_S)
            else:
                count.seconds.append(time.perf_counter() - start)

    def _complain(self, kind: str, fault: str) -> None:
        told = self.counts[kind].told
        if len(told) < KEPT:
            told.append(fault)
            self.told(f"{kind}: {fault}")

    async def _watch(self) -> None:
        """Memory at even distances, and a word on how it goes."""
        every = min(EVERY_S, self.plan.seconds / MOST_SAMPLES)
        while True:
            self.memory.sample()
            await asyncio.sleep(every)
            done = sum(count.requests for count in self.counts.values())
            faults = sum(count.wrong for count in self.counts.values())
            if every >= EVERY_S:
                self.told(f"{done} requests, {faults} faults, {_sizes(self.memory)}")


@contextmanager
def _stopped_by_ctrl_c(stop: asyncio.Event) -> Iterator[None]:
    """The first ctrl-C ends the traffic, so that the rest is still told; a second one ends everything."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or no such signals here
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _settled(client: httpx.AsyncClient) -> dict[str, float]:
    """What is not at rest when it has had time to be."""
    end = time.monotonic() + SETTLE_S
    while (left := busy(await _figures(client))) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return left


async def _figures(client: httpx.AsyncClient) -> dict[str, float]:
    """What the server tells of itself; nothing if it is gone."""
    try:
        return figures((await client.get("/metrics")).text)
    except httpx.HTTPError:
        return {}


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def _model(client: httpx.AsyncClient, base_url: str) -> str:
    try:
        return await first_model(client, base_url)
    except (httpx.HTTPError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{base_url} does not answer as expected: {reason}", param="base_url") from None


def _check(name: str, holds: bool, found: str) -> dict[str, Any]:
    return {"check": name, "verdict": "passed" if holds else "FAILED", "found": found}


def _told(numbers: Any) -> str:
    return ", ".join(f"{name}: {value:g}" for name, value in numbers.items())


def _sizes(memory: Memory) -> str:
    return ", ".join(f"{memory.titles[pid]} {size:.0f} MiB" for pid, size in memory.samples[-1].items())


def _ms(seconds: list[float], point: float) -> float | None:
    value = percentile(seconds, point)
    return None if value is None else 1e3 * value
