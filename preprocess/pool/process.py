"""One worker process as its keeper sees it: messages in, messages out, and an end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from mmserve.core.arena import Arena
from mmserve.core.wire import PREFIX_BYTES, length_of
from mmserve.preprocess.pool.messages import (
    Cancel,
    Denied,
    FromWorker,
    Need,
    Ready,
    ToWorker,
    from_worker,
    to_bytes,
)

GRACE_S = 1.0  # for a worker to give up a job that nobody waits for, before it is killed

# A worker uses one core: as many run at once as there are to be.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OPENCV_FOR_THREADS_NUM": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerGone(Exception):
    """The process ended, or says what no worker would say."""


class WorkerProcess:
    """Made by ``start``, given back by ``end``; used from the keeper's loop only.

    ``gone`` is called when the process has ended by itself.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gone: Callable[[], None],
    ) -> None:
        self.pid = process.pid
        self.alive = True
        self._process = process
        self._writer = writer
        self._gone = gone
        self._inbox: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, hello: bytes, arena: Arena, gone: Callable[[], None]) -> "WorkerProcess":
        """Start a process and greet it; it answers ``Ready`` when it can take jobs."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = (theirs.fileno(), arena.fd)
            process = subprocess.Popen(
                # -P: the folder that the server was started in is no place to import from.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "mmserve.preprocess.pool.worker",
                    *map(str, (*passed, os.getpid())),
                ],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD,
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer, gone)
        writer.write(hello)
        return worker

    async def ready(self, seconds: float) -> bool:
        """Whether it said so in time."""
        try:
            async with asyncio.timeout(seconds):
                return isinstance(await self.receive(), Ready)
        except (TimeoutError, WorkerGone):
            return False

    def send(self, message: ToWorker) -> None:
        if self.alive:
            self._writer.write(to_bytes(message))

    async def receive(self) -> FromWorker:
        """Its next message. WorkerGone when there will be none."""
        if not self.alive and self._inbox.empty():
            raise WorkerGone
        message = await self._inbox.get()
        if message is None:
            raise WorkerGone
        return message

    async def stop(self, job: int) -> None:
        """Have it give up ``job``; kill it if it does not answer."""
        self.send(Cancel(job))
        try:
            async with asyncio.timeout(GRACE_S):
                while isinstance(await self.receive(), Need):
                    self.send(Denied())
        except (TimeoutError, WorkerGone):
            await self.end()

    async def end(self) -> str:
        """Kill it if it still runs, wait until it is no more, and tell how it ended."""
        self.alive = False
        self._reading.cancel()
        self._process.kill()
        status = await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        self._writer.close()
        return _how(status)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = length_of(await reader.readexactly(PREFIX_BYTES))
                self._inbox.put_nowait(from_worker(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError, ValueError):
            self.alive = False
            self._inbox.put_nowait(None)
            self._gone()


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
