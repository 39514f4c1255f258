"""The end of a server: nobody new is let in, who is inside may finish, and who is left in the end is told."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mmserve.server.errors import Stopping

log = logging.getLogger("mmserve.server")

LAST_WORDS_S = 2.0  # for who is cut off to be told


class Drain:
    """Knows who is inside, and lets nobody in once it has ``begun``."""

    def __init__(self) -> None:
        self.begun = False
        self._inside: set[asyncio.Task[None]] = set()
        self._told: set[Callable[[], None]] = set()

    def check(self) -> None:
        """Stopping for who comes too late."""
        if self.begun:
            raise Stopping("the server is stopping and takes no more requests; send it to another one")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around one request, in a task of its own."""
        task = asyncio.current_task()
        assert task is not None
        self._inside.add(task)
        try:
            yield
        finally:
            self._inside.discard(task)

    @contextmanager
    def telling(self, leave: Callable[[], None]) -> Iterator[None]:
        """Inside the block ``leave`` is called when the end begins: for who would stay as long as it may."""
        self._told.add(leave)
        try:
            yield
        finally:
            self._told.discard(leave)

    async def run(self, seconds: float) -> None:
        """Return when nobody is inside any more; who still is after ``seconds`` is cut off."""
        self.begun = True
        for leave in list(self._told):
            leave()
        there = set(self._inside)
        if there:
            log.info("stopping: %d requests have %g s to finish", len(there), seconds)
            await asyncio.wait(there, timeout=seconds)
        late = set(self._inside)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=LAST_WORDS_S)
        log.info("stopped: %d requests finished, %d were cut off", len(there) - len(late), len(late))
