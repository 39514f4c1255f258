"""``Workers`` as processes: what callers see of the pool."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmserve.core.arena import Arena
from mmserve.core.config import MediaOptions
from mmserve.core.messages import ChatInput
from mmserve.preprocess.image import background_color
from mmserve.preprocess.media import MediaPart, Medium
from mmserve.preprocess.pool.jobs import OUTCOMES, GlanceJob, LayOutJob, SeeJob
from mmserve.preprocess.pool.keeper import Crew, Keeper
from mmserve.preprocess.pool.memory import PixelMemory
from mmserve.preprocess.pool.messages import Hello, to_bytes
from mmserve.preprocess.prompt import Prepared, to_prepared
from mmserve.preprocess.spec import ProcessorSpec


class WorkerPool:
    """``options.workers`` processes that decode pictures and clips, and one more that lays out prompts, so
    that no clip, however long, holds up words.

    The pixels of a ``Medium`` are read-only views of shared memory, into which the worker has resized them;
    the memory is free again when the last of them has died. A worker that is lost costs the item it was at.
    """

    def __init__(self, spec: ProcessorSpec, options: MediaOptions) -> None:
        background_color(options)
        self._seconds = options.prepare_timeout_s
        self._pieces: Counter[str] = Counter()
        self._memory = PixelMemory(Arena(options.arena_mib << 20, self._freed))
        memory_bytes = options.worker_memory_mib << 20
        bare = replace(spec, tokenizer_json="", chat_template=None)
        arena_bytes, limit = self._memory.arena.total, options.max_preparing
        eyes = Hello(False, bare, options, arena_bytes, memory_bytes)
        writer = Hello(True, spec, options, arena_bytes, memory_bytes)
        self._eyes = Crew("picture", options.workers, to_bytes(eyes), limit, self._may_begin)
        self._writer = Crew("prompt", 1, to_bytes(writer), limit)
        self._keeper = Keeper(self._memory, (self._eyes, self._writer), memory_bytes)

    @property
    def arena(self) -> Arena:
        return self._memory.arena

    @property
    def ready(self) -> bool:
        return self._keeper.ready

    def wait_ready(self) -> None:
        self._keeper.started.result()

    async def see(
        self, part: MediaPart, *, request: str | None = None, deadline: float | None = None
    ) -> Medium:
        job = SeeJob(part, self._memory, request or object(), self._seconds, deadline)
        return await asyncio.wrap_future(self._keeper.submit(self._eyes, job))

    async def glance(self, data: bytes, *, request: object) -> np.ndarray:
        job = GlanceJob(data, self._memory, request, self._seconds)
        return await asyncio.wrap_future(self._keeper.submit(self._eyes, job))

    async def assemble(self, chat: ChatInput, media: Sequence[Medium]) -> Prepared:
        job = LayOutJob(chat, media, self._pieces, self._seconds)
        prompt = await asyncio.wrap_future(self._keeper.submit(self._writer, job))
        return to_prepared(chat, media, prompt)

    def stats(self) -> dict[str, Any]:
        keeper, arena = self._keeper, self._memory.arena
        return {
            "workers": "processes",
            "workers_alive": len(self._eyes.workers) + len(self._writer.workers),
            "workers_lost": keeper.lost,
            "workers_recycled": keeper.recycled,
            "preparing": len(self._eyes.seats) + len(self._writer.seats),
            "jobs_queued": len(self._eyes.queue) + len(self._writer.queue),
            "token_pieces_hits": self._pieces["hits"],
            "token_pieces_misses": self._pieces["misses"],
            "arena_bytes": arena.total,
            "arena_used_bytes": arena.used,
            **{f"jobs_{outcome}": keeper.outcomes[outcome] for outcome in OUTCOMES},
        }

    async def close(self) -> None:
        await asyncio.to_thread(self._keeper.close)

    def _may_begin(self, job: Any) -> bool:
        return self._memory.may_begin(job.request, job.needs)

    def _freed(self) -> None:
        self._keeper.ring()
