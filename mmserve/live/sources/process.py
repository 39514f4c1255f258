"""One camera's process, as the api sees it: started, listened to, and ended with its camera."""

import asyncio
import logging
import socket
from contextlib import suppress

from mmserve.core.config import CameraOptions, MediaOptions
from mmserve.live.sources.line import Line
from mmserve.live.sources.messages import CameraHello, PullHello, WhipHello
from mmserve.processes.child import ONE_THREAD, Child, ChildDied
from mmserve.processes.pulse import Patience

log = logging.getLogger("mmserve.cameras")

STEP_S = 60.0  # for one frame to be decoded
LAST_S = 5.0  # for a process to be no more when its line has ended


class CameraProcess:
    """Made by ``start``, given back by ``end``. ``line`` has words and pictures."""

    def __init__(self, child: Child, line: Line) -> None:
        self.child = child
        self.line = line

    @classmethod
    async def start(cls, hello: CameraHello, options: CameraOptions, hang_s: float) -> "CameraProcess":
        """A process for the camera of ``hello``. It may not be ready yet."""
        kind = "pull" if isinstance(hello, PullHello) else "whip"
        ours, theirs = socket.socketpair()
        with theirs:
            child = await Child.start(
                f"{kind} camera",
                "",
                hello,
                theirs.fileno(),
                patience=Patience(hang_s, STEP_S),
                env=ONE_THREAD,
                module=f"mmserve.live.sources.{kind}",
            )
        return cls(child, Line(ours, options.camera_max_pixels))

    async def end(self) -> None:
        """End it; whoever is cancelled meanwhile leaves nothing behind."""
        self.line.close()
        await asyncio.shield(asyncio.ensure_future(self.child.end()))

    async def how(self) -> str:
        """How it has ended, after its line has."""
        try:
            async with asyncio.timeout(LAST_S):
                return str(await self.child.death())
        except TimeoutError:
            return "it hung up"


class Spare:
    """From ``begin``, or else the first WebRTC client, on a process waits for the next one, which then does
    not wait for it: what it has to load takes seconds."""

    def __init__(self, options: CameraOptions, media: MediaOptions, hang_s: float) -> None:
        self._options = options
        self._hello = WhipHello(options, media)
        self._hang_s = hang_s
        self._starting: asyncio.Task[CameraProcess] | None = None

    def begin(self) -> None:
        """Have one wait for the first client, too."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def take(self) -> CameraProcess:
        """The process that waits, or a new one; another begins to wait."""
        waiting, self._starting = self._starting, None
        process = None if waiting is None else await _alive(waiting)
        if process is None:
            process = await self._start()
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_after(process))
        return process

    async def close(self) -> None:
        if self._starting is not None:
            starting, self._starting = self._starting, None
            starting.cancel()
            [process] = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(process, CameraProcess):
                await process.end()

    async def _start_after(self, other: CameraProcess) -> CameraProcess:
        """One at a time: the client of ``other`` waits."""
        with suppress(ChildDied):
            await other.child.ready()
        return await self._start()

    async def _start(self) -> CameraProcess:
        return await CameraProcess.start(self._hello, self._options, self._hang_s)


async def _alive(starting: asyncio.Task[CameraProcess]) -> CameraProcess | None:
    """The process that waits; None if it has ended meanwhile, or could not be started."""
    try:
        process = await starting
    except OSError:
        log.exception("the process that was to wait for a WebRTC client could not be started")
        return None
    if not process.child.over:
        return process
    await process.end()
    return None
