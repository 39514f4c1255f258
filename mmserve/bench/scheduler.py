"""What a step costs the host before any arithmetic: the scheduler alone, with a runner that does nothing."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from mmserve.core.config import SchedulerOptions
from mmserve.core.messages import PreparedRequest, SamplingParams, VisionItem
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pages import PageAllocator
from mmserve.engine.kv.radix import RadixCache
from mmserve.engine.scheduler.memory import Memory
from mmserve.engine.scheduler.request import Batch, Request
from mmserve.engine.scheduler.scheduler import Scheduler

PAGE_SIZE = 16
PROMPT, ANSWER = 300, 4096  # tokens; nobody finishes while it is measured
SHARED = 64  # tokens that all prompts begin with, as a system prompt
TOKEN = 7


class NoPictures:
    """``Features`` of requests without any."""

    def encoded(self, item: VisionItem) -> bool:
        return True

    def cost(self, item: VisionItem) -> int:
        return 0

    def claim(self, request: Request) -> None:
        request.ready_len = request.num_tokens

    def release_computed(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


def measure(running: int, steps: int) -> dict[str, Any]:
    """Medians in microseconds over ``steps`` steps in which ``running`` requests decode."""
    scheduler = _filled(running)
    times: dict[str, list[float]] = {"schedule": [], "advance": [], "append": []}
    for _ in range(steps):
        batch = _timed(times["schedule"], partial(_schedule, scheduler))
        _timed(times["advance"], partial(scheduler.advance, batch))
        _timed(times["append"], partial(_append, batch))
    row: dict[str, Any] = {"running": running}
    row |= {f"{name} µs": 1e6 * median(values) for name, values in times.items()}
    row["step µs"] = sum(row[f"{name} µs"] for name in times)
    return row


def _filled(running: int) -> Scheduler:
    """A scheduler in which ``running`` requests have been prefilled and decode."""
    options = SchedulerOptions(max_running=running, max_waiting=running, step_tokens=8192)
    pages = running * -(-(PROMPT + ANSWER) // PAGE_SIZE) + 1
    memory = Memory(PageAllocator(pages + 1), RadixCache(PAGE_SIZE))
    scheduler = Scheduler(options, memory, NoPictures())
    for number in range(running):
        scheduler.add(_request(number))
    while scheduler.prefilling or scheduler.waiting:
        batch = _schedule(scheduler)
        scheduler.advance(batch)
        _append(batch)
    return scheduler


def _request(number: int) -> Request:
    ids = np.arange(PROMPT, dtype=np.int32)
    keys = ids.astype(np.int64)
    keys[SHARED:] += 1_000_000 * (number + 1)
    prepared = PreparedRequest(
        request_id=str(number),
        token_ids=ids,
        radix_keys=keys,
        positions=np.tile(ids, (3, 1)),
        position_delta=0,
        items=(),
        sampling=SamplingParams(),
    )
    return Request(prepared, number, ANSWER, frozenset(), PageTable(PAGE_SIZE))


def _schedule(scheduler: Scheduler) -> Batch:
    """All that the engine asks of the scheduler in one step."""
    scheduler.next_items(256)
    scheduler.park_lacking()
    return scheduler.schedule()


def _append(batch: Batch) -> None:
    for request in batch.sampling:
        request.append(TOKEN)


def _timed(times: list[float], work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    times.append(time.perf_counter() - start)
    return result
