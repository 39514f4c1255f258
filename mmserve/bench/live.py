"""Synthetic cameras against a server: how many it sustains, how old what they saw is, and what they cost."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from mmserve.bench import live_scene
from mmserve.bench.processes import cpu_seconds
from mmserve.bench.soak_watch import Memory, figures
from mmserve.bench.summary import percentile
from mmserve.client import LiveClient, LiveError
from mmserve.core.errors import ConfigError

QUESTION = "What do you see now?"
SUSTAINED = 0.95  # of a camera's questions that must be answered in time
FIRST_S = 1.0  # after a camera's first frame it is asked for the first time
SAMPLE_S = 0.5  # between two looks at the server's memory
QUIET_S = 1.0  # between two runs, for what was under way to end
PERIODS_LATE = 1.0  # by which this program itself may be late with a frame before it leaves it out
STAGES = ("received", "gated", "decoded", "encoded", "prefilled", "first_token")


@dataclass(frozen=True)
class Plan:
    """From each camera ``seconds`` of frames of ``size`` (width, height), ``fps`` a second, and a question
    every ``ask_every`` seconds, whose answer of ``max_tokens`` is due after ``deadline_ms``. ``policy`` are
    fields of the sessions' policy."""

    fps: float = 10.0
    seconds: float = 20.0
    scene: live_scene.Kind = "moving"
    size: tuple[int, int] = (320, 240)
    ask_every: float = 4.0
    deadline_ms: float = 2000.0
    max_tokens: int = 16
    policy: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def whole_policy(self) -> dict[str, Any]:
        sampling = {"temperature": 0, "ignore_eos": True}
        return {"deadline_ms": self.deadline_ms, "sampling": sampling, **self.policy}


@dataclass
class CameraRun:
    """What became of one camera. Times in seconds, ages in milliseconds; ``fates`` of frames by reason."""

    sent: int = 0
    left_out: int = 0  # frames that this program was too late for, or the network too slow
    asked: int = 0
    in_time: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)  # to first words
    whole: list[float] = field(default_factory=list)  # to the end of the answer
    ages: list[float] = field(default_factory=list)  # of the newest frame known, at first words
    fates: Counter[str] = field(default_factory=Counter)
    ended: str | None = None  # why it was refused, or did not last

    @property
    def sustained(self) -> bool:
        return self.ended is None and self.asked > 0 and self.in_time >= SUSTAINED * self.asked


@dataclass
class LoadRun:
    """All cameras of one run, and what the server spent on them."""

    cameras: list[CameraRun]
    seconds: float
    cpu_s: float | None
    memory_mib: float | None
    rises: Mapping[str, float]  # of the server's counters

    def row(self) -> dict[str, Any]:
        cameras = self.cameras
        ages = [age for camera in cameras for age in camera.ages]
        first = [1e3 * s for camera in cameras for s in camera.first]
        asked, in_time = sum(c.asked for c in cameras), sum(c.in_time for c in cameras)
        kept = sum(c.fates["kept"] for c in cameras)
        cores = None if self.cpu_s is None else self.cpu_s / self.seconds
        return {
            "cameras": len(cameras),
            "sustained": sum(c.sustained for c in cameras),
            "refused": sum(c.ended is not None for c in cameras),
            "in time": f"{in_time} of {asked}",
            "TTFT p50 ms": percentile(first, 50),
            "TTFT p95 ms": percentile(first, 95),
            **{f"age p{point} ms": percentile(ages, point) for point in (50, 95, 99)},
            "sent/s": sum(c.sent for c in cameras) / self.seconds,
            "kept/s": kept / self.seconds,
            "encoded": self.rises.get("mmserve_encoded_items_total"),
            "CPU cores": cores,
            "CPU ms/kept": None if self.cpu_s is None or not kept else 1e3 * self.cpu_s / kept,
            "MiB": self.memory_mib,
        }

    def frames_row(self) -> dict[str, Any]:
        """What became of frames, by reason."""
        fates: Counter[str] = sum((c.fates for c in self.cameras), Counter())
        sent = sum(c.sent for c in self.cameras)
        return {
            "cameras": len(self.cameras),
            "sent": sent,
            **{fate: fates[fate] for fate in FATES},
            "not told": max(0, sent - sum(fates.values())),
            "never sent": sum(c.left_out for c in self.cameras),
        }

    def stages_row(self) -> dict[str, Any]:
        """The mean age of frames when they passed each stage, in milliseconds, as the server has it."""
        row: dict[str, Any] = {"cameras": len(self.cameras)}
        for stage in STAGES:
            total, count = (
                self.rises.get(f'mmserve_live_frame_age_seconds_{what}{{stage="{stage}"}}', 0.0)
                for what in ("sum", "count")
            )
            row[f"{stage} ms"] = 1e3 * total / count if count else None
        return row

    @property
    def faults(self) -> dict[str, int]:
        """Failed answers and ends of cameras, by kind."""
        found: Counter[str] = sum((c.errors for c in self.cameras), Counter())
        found.update(c.ended for c in self.cameras if c.ended is not None)
        return dict(found)


FATES = ("kept", "superseded", "unchanged", "rate", "late", "too_big", "decode_error", "closed")


async def load(
    base_url: str,
    plan: Plan,
    count: int,
    *,
    pid: int | None = None,
    api_key: str | None = None,
    run: int = 0,
) -> LoadRun:
    """``count`` cameras at once. No two of them, and no two of different ``run`` numbers, show the same."""
    films = await asyncio.gather(*(_film(plan, 10_007 * run + number) for number in range(count)))
    memory, ready = Memory(pid), asyncio.Barrier(count + 1)
    async with httpx.AsyncClient(base_url=base_url, timeout=30.0) as web:
        await asyncio.sleep(QUIET_S)
        phases = [(number + 0.5) / count for number in range(count)]
        jobs = [
            asyncio.create_task(_camera(base_url, plan, film, phase, api_key, ready))
            for film, phase in zip(films, phases, strict=True)
        ]
        try:
            await ready.wait()
            started = time.perf_counter()
            before, cpu = await _figures(web), _cpu(pid)
            watch = asyncio.create_task(_sample(memory))
            cameras = await asyncio.gather(*jobs)
            watch.cancel()
        finally:
            for job in jobs:
                job.cancel()
        seconds = time.perf_counter() - started
        spent = None if cpu is None else (_cpu(pid) or 0.0) - cpu
        after = await _figures(web)
    rises = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return LoadRun(cameras, seconds, spent, _total_mib(memory), rises)


async def _film(plan: Plan, number: int) -> list[bytes]:
    count = int(plan.fps * plan.seconds) + 1
    seed = 1_000_003 * plan.seed + 2 * number
    return await asyncio.to_thread(live_scene.frames, plan.scene, plan.size, count, seed)


# ---------------------------------------------------------------- one camera


async def _camera(
    base_url: str,
    plan: Plan,
    film: Sequence[bytes],
    phase: float,
    api_key: str | None,
    ready: asyncio.Barrier,
) -> CameraRun:
    """One camera for its time, which begins when all are connected; ``phase`` (0 to 1) is where in its
    periods it begins."""
    run, waited = CameraRun(), False
    client = LiveClient(
        base_url,
        api_key=api_key,
        policy=plan.whole_policy,
        max_tokens=plan.max_tokens,
        synced=True,
        give_up_s=0,
    )
    try:
        async with client:
            waited = True
            await ready.wait()
            await _watched(client, plan, film, phase, run)
    except LiveError as error:
        run.ended = error.message
    finally:
        if not waited:
            await ready.wait()  # the others do not wait for one that cannot come
    run.sent, run.fates = client.sent, client.fates
    run.left_out += client.replaced
    return run


async def _watched(
    client: LiveClient, plan: Plan, film: Sequence[bytes], phase: float, run: CameraRun
) -> None:
    """Frames and questions. LiveError if the camera has ended meanwhile."""
    end = time.monotonic() + plan.seconds
    feed, ask = _feed(client, plan, film, phase, end, run), _ask_on(client, plan, phase, end, run)
    work = asyncio.ensure_future(asyncio.gather(feed, ask))
    ended = asyncio.create_task(client.ended())
    try:
        both: set[asyncio.Future[Any]] = {work, ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ended.result()
        work.result()
    finally:
        work.cancel()
        ended.cancel()
        await asyncio.gather(work, ended, return_exceptions=True)


async def _feed(
    client: LiveClient, plan: Plan, film: Sequence[bytes], phase: float, end: float, run: CameraRun
) -> None:
    """A frame whenever one is due; what is overdue is left out."""
    period = 1 / plan.fps
    start = time.monotonic() + phase * period
    for number in range(int(plan.fps * plan.seconds)):
        due = start + number * period
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        if now >= end:
            return
        if now - due > PERIODS_LATE * period:
            run.left_out += 1
        else:
            client.put(film[number % len(film)], now)


async def _ask_on(client: LiveClient, plan: Plan, phase: float, end: float, run: CameraRun) -> None:
    """A question at even distances, each when the one before is answered; none that could not be in time."""
    due = time.monotonic() + FIRST_S + phase * plan.ask_every
    last = end - plan.deadline_ms / 1e3
    while due < last:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await _ask(client, plan, run)
        due += plan.ask_every
        while due < time.monotonic():
            due += plan.ask_every
    await asyncio.sleep(max(0.0, end - time.monotonic()))


async def _ask(client: LiveClient, plan: Plan, run: CameraRun) -> None:
    """One question. LiveError if the camera itself has ended."""
    run.asked += 1
    asked, first = time.perf_counter(), None
    try:
        async with aclosing(client.ask(QUESTION)) as pieces:
            async for piece in pieces:
                if first is None:
                    first = time.perf_counter() - asked
                    run.first.append(first)
                    if piece.age_ms is not None:
                        run.ages.append(piece.age_ms)
    except LiveError as error:
        if error.closed is not None:
            raise
        run.errors[error.code] += 1
        return
    run.whole.append(time.perf_counter() - asked)
    run.in_time += 1e3 * run.whole[-1] <= plan.deadline_ms


# ---------------------------------------------------------------- the server's own


async def _sample(memory: Memory) -> None:
    while True:
        memory.sample()
        await asyncio.sleep(SAMPLE_S)


def _total_mib(memory: Memory) -> float | None:
    """Private memory of all processes together, at its most."""
    return max((sum(sizes.values()) for sizes in memory.samples), default=None)


def _cpu(pid: int | None) -> float | None:
    return None if pid is None else cpu_seconds(pid)


async def _figures(web: httpx.AsyncClient) -> dict[str, float]:
    try:
        return figures((await web.get("/metrics")).raise_for_status().text)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{web.base_url} does not answer as expected: {reason}", param="server") from None


# ---------------------------------------------------------------- what it comes to


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What one camera more costs, between the fewest and the most: CPU cores and MiB; empty if not known."""
    few, many = (choose(rows, key=lambda row: row["cameras"]) for choose in (min, max))
    more = many["cameras"] - few["cameras"]
    names = [name for name in ("CPU cores", "MiB") if few[name] is not None and many[name] is not None]
    return {name: (many[name] - few[name]) / more for name in names} if more else {}


async def measure(
    base_url: str,
    plan: Plan,
    counts: Sequence[int],
    told: Callable[[str], None],
    *,
    pid: int | None = None,
    api_key: str | None = None,
) -> list[LoadRun]:
    """One run for each of ``counts``, one after the other."""
    runs = []
    for number, count in enumerate(counts):
        runs.append(await load(base_url, plan, count, pid=pid, api_key=api_key, run=number))
        row = runs[-1].row()
        told(f"{count} cameras: {row['sustained']} sustained, {row['in time']} answers in time")
    return runs
