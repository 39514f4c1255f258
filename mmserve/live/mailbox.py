"""Where a camera's frames arrive: room for one, and the latest wins."""

import asyncio
import threading

from mmserve.live.frame import Frame


class Mailbox:
    """One slot. Any thread may ``put``; one coroutine at a time may ``take`` or ``pause``."""

    def __init__(self) -> None:
        self._slot: Frame | None = None
        self._nudged = False
        self._lock = threading.Lock()
        self._sleeper: tuple[asyncio.AbstractEventLoop, asyncio.Future[None], bool] | None = None

    def __len__(self) -> int:
        return int(self._slot is not None)

    def put(self, frame: Frame) -> Frame | None:
        """Leave ``frame``; the one that it supersedes, which nobody will take any more."""
        with self._lock:
            older, self._slot = self._slot, frame
            if self._sleeper is not None and not self._sleeper[2]:
                self._wake()
        return older

    async def take(self, seconds: float | None = None) -> Frame | None:
        """The frame, as soon as there is one; None after ``seconds``, or when nudged before."""
        await self._sleep(seconds, for_nudges_only=False)
        with self._lock:
            frame, self._slot = self._slot, None
            self._nudged = False
        return frame

    async def pause(self, seconds: float) -> None:
        """Leave what comes in the slot for ``seconds``, or until nudged."""
        await self._sleep(seconds, for_nudges_only=True)

    def nudge(self) -> None:
        """End the pause or the wait that is under way, or the next one."""
        with self._lock:
            self._nudged = True
            if self._sleeper is not None:
                self._wake()

    def empty(self) -> Frame | None:
        """Take what is there, without waiting."""
        with self._lock:
            frame, self._slot = self._slot, None
        return frame

    async def _sleep(self, seconds: float | None, *, for_nudges_only: bool) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._nudged or (self._slot is not None and not for_nudges_only):
                return
            future: asyncio.Future[None] = loop.create_future()
            self._sleeper = (loop, future, for_nudges_only)
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._sleeper = None

    def _wake(self) -> None:
        """End the sleep. The lock is held."""
        assert self._sleeper is not None
        loop, future, _ = self._sleeper
        self._sleeper = None
        if not loop.is_closed():
            loop.call_soon_threadsafe(_finish, future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
