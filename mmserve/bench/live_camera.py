"""One synthetic camera of a benchmark: what it shows, what it is asked, and what became of both."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from mmserve.bench import live_scene
from mmserve.client import LiveClient, LiveError

QUESTION = "What do you see now?"
SUSTAINED = 0.95  # of a camera's questions that must be answered in time
FIRST_S = 1.0  # after a camera's first frame it is asked for the first time
PERIODS_LATE = 1.0  # by which this program itself may be late with a frame before it leaves it out


@dataclass(frozen=True)
class Plan:
    """From each camera ``seconds`` of frames of ``size`` (width, height), ``fps`` a second, and a question
    every ``ask_every`` seconds (none at all if None), whose answer of ``max_tokens`` is due after
    ``deadline_ms``. ``policy`` are fields of the sessions' policy. Beside them so many ``idle`` cameras,
    which show a scene that stands still, ``idle_fps`` frames a second, and are asked nothing."""

    fps: float = 10.0
    seconds: float = 20.0
    scene: live_scene.Kind = "moving"
    size: tuple[int, int] = (320, 240)
    ask_every: float | None = 4.0
    deadline_ms: float = 2000.0
    max_tokens: int = 16
    policy: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    idle: int = 0
    idle_fps: float = 1.0

    @property
    def of_idle(self) -> "Plan":
        """What an idle camera does."""
        return replace(self, scene="static", fps=self.idle_fps, ask_every=None)

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
        """It lasted, and was answered in time."""
        return self.ended is None and self.asked > 0 and self.in_time >= SUSTAINED * self.asked


async def camera(
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
    if plan.ask_every is None:
        return await asyncio.sleep(max(0.0, end - time.monotonic()))
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
