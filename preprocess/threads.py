"""The plain form of the pool: threads of this process that share one ``Processor``."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from mmserve.core.messages import ChatInput
from mmserve.preprocess.media import MediaPart, Medium
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.prompt import Prepared
from mmserve.preprocess.seats import Seats

THREADS = 2

T = TypeVar("T")


class ThreadWorkers:
    """``Workers`` without processes: decoding and resizing release the interpreter's lock.

    Nothing protects this process from a file that crashes a decoder or takes all memory, and what has
    begun cannot be stopped: a caller that leaves or is overdue only stops waiting for it.
    """

    arena = None

    def __init__(self, processor: Processor, *, max_preparing: int, threads: int = THREADS) -> None:
        self.processor = processor
        self._seats = Seats(max_preparing)
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prepare")

    @property
    def ready(self) -> bool:
        return not self._closed

    def wait_ready(self) -> None:
        pass

    async def see(
        self, part: MediaPart, *, request: str | None = None, deadline: float | None = None
    ) -> Medium:
        with self._seat(request or object()):
            return await self._run(self.processor.see, part)

    async def glance(self, data: bytes, *, request: object) -> np.ndarray:
        with self._seat(request):
            return await self._run(self.processor.glance, data)

    async def assemble(self, chat: ChatInput, media: Sequence[Medium]) -> Prepared:
        with self._seat(chat.request_id):
            return await self._run(self.processor.assemble, chat, media)

    def stats(self) -> dict[str, Any]:
        pieces = self.processor.text.pieces
        return {
            "workers": "threads",
            "preparing": len(self._seats),
            "token_pieces_hits": pieces.hits,
            "token_pieces_misses": pieces.misses,
        }

    async def close(self) -> None:
        """Give up what has not begun and wait for what has."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    @contextmanager
    def _seat(self, request: object) -> Iterator[None]:
        with self._lock:
            self._seats.take(request)
        try:
            yield
        finally:
            with self._lock:
                self._seats.leave(request)

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
