"""Frames on their way to a server: the header of ``mmserve.frames.v1``, and a slot that holds the newest."""

import asyncio
import struct
import time

SUBPROTOCOL = "mmserve.frames.v1"
HEADER = struct.Struct("!2sBBIQ")  # magic, version, flags, sequence number, microseconds
MAGIC, VERSION = b"MF", 1
HAS_TIME, UNIX_TIME = 1, 2
MOST_UNKNOWN = 8  # frames of which the server has not told yet what became of them
UNTOLD_S = 1.0  # after which nothing more is expected to be told of them


def message(data: bytes, seq: int, captured: float, synced: bool = False) -> bytes:
    """A frame as one binary message. ``captured`` is in seconds of ``time.monotonic`` of this machine, whose
    wall clock agrees with the server's if it is ``synced``."""
    flags = HAS_TIME
    if synced:
        flags, captured = HAS_TIME | UNIX_TIME, captured + time.time() - time.monotonic()
    micros = max(0, int(captured * 1e6))
    return HEADER.pack(MAGIC, VERSION, flags, seq & 0xFFFFFFFF, micros) + data


class Slot:
    """The newest frame that has not left. A newer one takes its place, so that there is never a queue."""

    def __init__(self) -> None:
        self._message: bytes | None = None
        self._news = asyncio.Event()

    def put(self, message: bytes) -> bool:
        """Whether another frame was there, which will not be sent now."""
        replaced = self._message is not None
        self._message = message
        self._news.set()
        return replaced

    async def take(self) -> bytes:
        await self._news.wait()
        self._news.clear()
        taken, self._message = self._message, None
        assert taken is not None
        return taken


class Unknown:
    """Counts frames that were sent and of which nothing has been told yet, so that none waits in the buffers
    of a slow network: what is sent next should be what is seen then."""

    def __init__(self) -> None:
        self._count = 0
        self._told = asyncio.Event()

    def sent(self) -> None:
        self._count += 1

    def told(self) -> None:
        self._count = max(0, self._count - 1)
        self._told.set()

    async def room(self) -> None:
        """Return when one more may be sent."""
        while self._count >= MOST_UNKNOWN:
            self._told.clear()
            try:
                async with asyncio.timeout(UNTOLD_S):
                    await self._told.wait()
            except TimeoutError:
                self._count = 0
