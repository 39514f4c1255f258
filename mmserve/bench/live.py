"""Synthetic cameras against a server: how many it sustains, how old what they saw is, and what they cost."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from mmserve.bench import live_scene
from mmserve.bench.live_camera import CameraRun, Plan, camera
from mmserve.bench.processes import cpu_seconds
from mmserve.bench.soak_watch import Memory, figures
from mmserve.bench.summary import percentile
from mmserve.core.errors import ConfigError

SAMPLE_S = 0.5  # between two looks at the server's memory
QUIET_S = 1.0  # between two runs, for what was under way to end
IDLE_FRAMES = 16  # of an idle camera, which shows them again and again
STAGES = ("received", "gated", "decoded", "encoded", "prefilled", "first_token")


@dataclass
class LoadRun:
    """All cameras of one run, and what the server spent on them; ``idle`` ones were asked nothing."""

    cameras: list[CameraRun]
    seconds: float
    cpu_s: float | None
    memory: Memory
    rises: Mapping[str, float]  # of the server's counters
    scene: live_scene.Kind = "moving"
    idle: list[CameraRun] = field(default_factory=list)

    @property
    def name(self) -> dict[str, Any]:
        """What tells it from the others of one report."""
        return {"cameras": len(self.cameras), "scene": self.scene}

    def row(self) -> dict[str, Any]:
        cameras = self.cameras
        ages = [age for camera in cameras for age in camera.ages]
        first, whole = (
            [1e3 * s for camera in cameras for s in getattr(camera, name)] for name in ("first", "whole")
        )
        asked, in_time = sum(c.asked for c in cameras), sum(c.in_time for c in cameras)
        kept = sum(c.fates["kept"] for c in [*cameras, *self.idle])
        cores = None if self.cpu_s is None else self.cpu_s / self.seconds
        return {
            **self.name,
            **self._idle_row(),
            "sustained": sum(c.sustained for c in cameras),
            "refused": sum(c.ended is not None for c in cameras),
            "in time": f"{in_time} of {asked}",
            "TTFT p50 ms": percentile(first, 50),
            "TTFT p95 ms": percentile(first, 95),
            "answer p50 ms": percentile(whole, 50),
            "answers/s": len(whole) / self.seconds,
            **{f"age p{point} ms": percentile(ages, point) for point in (50, 95, 99)},
            "sent/s": sum(c.sent for c in cameras) / self.seconds,
            "kept/s": kept / self.seconds,
            "encoded": self.rises.get("mmserve_encoded_items_total"),
            "CPU cores": cores,
            "CPU ms/kept": None if self.cpu_s is None or not kept else 1e3 * self.cpu_s / kept,
            "MiB": _most_mib(self.memory),
        }

    def _idle_row(self) -> dict[str, Any]:
        """Idle cameras, and how many of them were there to the end."""
        if not self.idle:
            return {}
        return {"idle": len(self.idle), "idle held": sum(c.ended is None for c in self.idle)}

    def memory_rows(self) -> list[dict[str, Any]]:
        """The private memory of each of the server's processes in the first third and in the last, once
        caches have filled; nothing where its pid is not known."""
        return [{**self.name, **line} for line in self.memory.table()]

    def frames_row(self) -> dict[str, Any]:
        """What became of frames, by reason."""
        cameras = [*self.cameras, *self.idle]
        fates: Counter[str] = sum((c.fates for c in cameras), Counter())
        sent = sum(c.sent for c in cameras)
        return {
            **self.name,
            "sent": sent,
            **{fate: fates[fate] for fate in FATES},
            "not told": max(0, sent - sum(fates.values())),
            "never sent": sum(c.left_out for c in cameras),
        }

    def stages_row(self) -> dict[str, Any]:
        """The mean age of frames when they passed each stage, in milliseconds, as the server has it."""
        row = self.name
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
        cameras = [*self.cameras, *self.idle]
        found: Counter[str] = sum((c.errors for c in cameras), Counter())
        found.update(c.ended for c in cameras if c.ended is not None)
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
    """``count`` cameras at once, and the plan's idle ones. No two of them, and no two of different ``run``
    numbers, show the same."""
    plans = [plan] * count + [plan.of_idle] * plan.idle
    films = await asyncio.gather(*(_film(each, 10_007 * run + n) for n, each in enumerate(plans)))
    memory, ready = Memory(pid), asyncio.Barrier(len(plans) + 1)
    async with httpx.AsyncClient(base_url=base_url, timeout=30.0) as web:
        await asyncio.sleep(QUIET_S)
        jobs = [
            asyncio.create_task(camera(base_url, each, film, phase, api_key, ready))
            for each, film, phase in zip(plans, films, _phases(count) + _phases(plan.idle), strict=True)
        ]
        try:
            await ready.wait()
            started = time.perf_counter()
            before, cpu = await _figures(web), _cpu(pid)
            watch = asyncio.create_task(_sample(memory))
            runs = await asyncio.gather(*jobs)
            watch.cancel()
        finally:
            for job in jobs:
                job.cancel()
        seconds = time.perf_counter() - started
        spent = None if cpu is None else (_cpu(pid) or 0.0) - cpu
        after = await _figures(web)
    rises = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return LoadRun(runs[:count], seconds, spent, memory, rises, plan.scene, runs[count:])


def _phases(count: int) -> list[float]:
    """Where in their periods so many cameras begin, from 0 to 1."""
    return [(number + 0.5) / count for number in range(count)]


async def _film(plan: Plan, number: int) -> list[bytes]:
    count = IDLE_FRAMES if plan.ask_every is None else int(plan.fps * plan.seconds) + 1
    seed = 1_000_003 * plan.seed + 2 * number
    return await asyncio.to_thread(live_scene.frames, plan.scene, plan.size, count, seed)


# ---------------------------------------------------------------- the server's own


async def _sample(memory: Memory) -> None:
    while True:
        memory.sample()
        await asyncio.sleep(SAMPLE_S)


def _most_mib(memory: Memory) -> float | None:
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
    """What one camera more costs, between the fewest and the most that show the first scene: CPU cores and
    MiB; empty if not known."""
    rows = [row for row in rows if row["scene"] == rows[0]["scene"]]
    few, many = (choose(rows, key=lambda row: row["cameras"]) for choose in (min, max))
    more = many["cameras"] - few["cameras"]
    names = [name for name in ("CPU cores", "MiB") if few[name] is not None and many[name] is not None]
    return {name: (many[name] - few[name]) / more for name in names} if more else {}


def static_shares(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By the number of cameras: what a scene that stands still costs the encoder, of what one costs that
    moves, in items."""
    encoded = {(row["scene"], row["cameras"]): row["encoded"] for row in rows}
    return {
        count: (encoded["static", count] or 0.0) / moved
        for (scene, count), moved in encoded.items()
        if scene == "moving" and moved and ("static", count) in encoded
    }


async def measure(
    base_url: str,
    plan: Plan,
    scenes: Sequence[live_scene.Kind],
    counts: Sequence[int],
    told: Callable[[str], None],
    *,
    pid: int | None = None,
    api_key: str | None = None,
) -> list[LoadRun]:
    """One run for each of ``scenes`` and ``counts``, one after the other."""
    runs: list[LoadRun] = []
    for scene in scenes:
        shown = replace(plan, scene=scene)
        for count in counts:
            runs.append(await load(base_url, shown, count, pid=pid, api_key=api_key, run=len(runs)))
            row = runs[-1].row()
            told(f"{count} cameras: {row['sustained']} sustained, {row['in time']} answers in time")
    return runs
