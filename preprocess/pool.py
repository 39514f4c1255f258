"""Preprocessing beside the event loop: parts of a request on all workers, a bounded queue."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from mmserve.core.errors import Overloaded
from mmserve.core.messages import ChatInput
from mmserve.preprocess.processor import Prepared, Processor

MAX_WAITING = 256

T = TypeVar("T")


class Preparer(Protocol):
    """What a server asks of preprocessing, however its workers are made."""

    async def prepare(self, chat: ChatInput) -> Prepared: ...
    async def close(self) -> None: ...


class PreparePool:
    """Threads that share one ``Processor``; decoding and resizing release the interpreter's lock.

    At most ``max_waiting`` requests are inside at once; more are refused with Overloaded. A caller that
    is cancelled leaves its queue places at once; what is running ends and is dropped.
    """

    def __init__(self, processor: Processor, *, workers: int, max_waiting: int = MAX_WAITING) -> None:
        self.processor = processor
        self.max_waiting = max_waiting
        self.waiting = 0
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="prepare")

    async def prepare(self, chat: ChatInput) -> Prepared:
        """As ``Processor.prepare``, with the parts of the request in parallel."""
        if self.waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.waiting} requests are being prepared, the most that is allowed; try later"
            )
        self.waiting += 1
        try:
            return await self._prepare(chat)
        finally:
            self.waiting -= 1

    async def _prepare(self, chat: ChatInput) -> Prepared:
        parts = self.processor.parts(chat)
        tasks = [asyncio.ensure_future(self._run(self.processor.see, part)) for part in parts]
        try:
            media = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return await self._run(self.processor.assemble, chat, media)

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def close(self) -> None:
        """Give up what has not begun and wait for what has."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
