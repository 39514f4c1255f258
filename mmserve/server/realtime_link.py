"""One realtime client's socket: what it says is read at once, what it is told waits in a bounded queue."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from msgspec import Struct
from starlette.websockets import WebSocket, WebSocketDisconnect

from mmserve.server.socket_door import POLICY, fitting

LAST_WORDS_S = 1.0  # for what is queued to leave before a close
CLIENT_GONE = 0  # the code of an end that the client itself made


class Ending(Struct, frozen=True):
    """Why a socket ends: the code of its close, and the reason in words."""

    code: int
    reason: str


class Link:
    """Events out and messages in. Whatever ends it first is its ``ending``; nothing is said after that.

    ``most_bytes`` of events may wait for a client that reads slowly; beyond it the client is given up.
    Echoes, which repeat what it sent itself, do not count: nothing more of it is heeded until there is
    ``room``, so there are those of one event at most.
    """

    def __init__(self, socket: WebSocket, most_bytes: int) -> None:
        self._socket = socket
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[str, bool]] = deque()
        self._bytes = 0  # of those that count
        self._echoes = 0
        self._changed = asyncio.Event()
        self._sent = asyncio.Condition()
        self.ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._heard = time.monotonic()  # when the client last said something

    def send(self, text: str, echo: bool = False) -> None:
        """Queue one event."""
        if self.ending.done():
            return
        if not echo and self._bytes + len(text) > self._most_bytes:
            self._forget()
            self.end(POLICY, f"the client does not read: over {self._most_bytes >> 10} KiB of events wait")
            return
        self._waiting.append((text, echo))
        self._count(text, echo, 1)
        self._changed.set()

    def end(self, code: int, reason: str) -> None:
        """Close with ``code`` and ``reason`` as soon as what is queued has left."""
        if not self.ending.done():
            self.ending.set_result(Ending(code, reason))

    async def room(self) -> None:
        """Return when no echo waits any more."""
        async with self._sent:
            await self._sent.wait_for(lambda: not self._echoes)

    @property
    def silent_s(self) -> float:
        """Seconds since the client last said something."""
        return time.monotonic() - self._heard

    async def messages(self) -> AsyncIterator[str | bytes]:
        """What the client says, until it leaves."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                self._forget()
                self.end(CLIENT_GONE, "the client left")
                return
            self._heard = time.monotonic()
            text = message.get("text")
            yield message["bytes"] if text is None else text

    async def write(self) -> None:
        """Send what is queued, for ever."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while self._waiting:
                    text, echo = self._waiting[0]
                    await self._socket.send_text(text)
                    if self._waiting:
                        self._waiting.popleft()
                        self._count(text, echo, -1)
                async with self._sent:
                    self._sent.notify_all()
        except WebSocketDisconnect:
            self._forget()
            self.end(CLIENT_GONE, "the client left")

    async def flushed(self) -> None:
        """Return when what is queued has left, or will not."""
        try:
            async with asyncio.timeout(LAST_WORDS_S), self._sent:
                await self._sent.wait_for(lambda: not self._waiting)
        except TimeoutError:
            pass

    async def close(self, ending: Ending) -> None:
        """Tell the client, if it is there to be told, why this ends."""
        if ending.code == CLIENT_GONE:
            return
        with suppress(WebSocketDisconnect, RuntimeError):  # it may leave at the same time
            await self._socket.close(ending.code, fitting(ending.reason))

    def _count(self, text: str, echo: bool, sign: int) -> None:
        if echo:
            self._echoes += sign
        else:
            self._bytes += sign * len(text)

    def _forget(self) -> None:
        self._waiting.clear()
        self._bytes = self._echoes = 0


class Inbox:
    """Events of a client that wait to be heeded, in order; who brings more than ``most_bytes`` waits."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._texts: deque[str] = deque()
        self._bytes = 0
        self._changed = asyncio.Condition()

    async def put(self, text: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes < self._most_bytes)
            self._texts.append(text)
            self._bytes += len(text)
            self._changed.notify_all()

    async def take(self) -> str:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._texts))
            text = self._texts.popleft()
            self._bytes -= len(text)
            self._changed.notify_all()
            return text

    def __bool__(self) -> bool:
        return bool(self._texts)


class Rate:
    """How many events a client may send: ``limit`` at once, and as many again in each minute."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left = float(limit)
        self._seen = time.monotonic()

    def take(self) -> bool:
        """Whether one more is allowed."""
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    @property
    def remaining(self) -> int:
        self._refill()
        return int(self._left)

    @property
    def reset_s(self) -> float:
        """Seconds until all of them are allowed again."""
        self._refill()
        return (self.limit - self._left) * 60 / self.limit

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self.limit, self._left + (now - self._seen) * self.limit / 60)
        self._seen = now
