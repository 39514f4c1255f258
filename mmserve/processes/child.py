"""One child process as its parent sees it: started, ready, and ended, however that comes."""

import asyncio
import os
import signal
import socket
import sys
from asyncio import subprocess
from collections.abc import Mapping
from typing import Any

from mmserve.core.errors import MMServeError
from mmserve.processes.messages import PREFIX_BYTES, NotReady, Ready, from_child, to_bytes

GRACE_S = 2.0  # for a child to end by itself when its socket has

# What makes text is quick, and one thread of it enough.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class ChildDied(Exception):
    """A child has ended by itself."""

    def __init__(self, child: "Child", how: str, error: MMServeError | None = None) -> None:
        super().__init__(f"the {child.name} process {child.pid} ended ({how})")
        self.child = child
        self.error = error  # what it said of it


class Child:
    """Made by ``start`` and given back by ``end``; used in one event loop only."""

    def __init__(
        self,
        name: str,
        process: subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._writer = writer
        self._ending = asyncio.create_task(process.wait())
        self._saying = asyncio.create_task(self._first_words(reader))

    @classmethod
    async def start(
        cls, name: str, folder: str, hello: Any, *fds: int, env: Mapping[str, str] | None = None
    ) -> "Child":
        """Run this package's module ``name``. It is given the descriptors of a socket to here and of ``fds``,
        this process's id, and the ``folder`` of the sockets, which it removes when this process ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = (theirs.fileno(), *fds)
            process = await asyncio.create_subprocess_exec(
                # -P: the folder that the server was started in is no place to import from.
                *(sys.executable, "-P", "-m", f"mmserve.processes.{name}"),
                *map(str, (*passed, os.getpid(), folder)),
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env=os.environ | (env or {}),
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        body = to_bytes(hello)
        writer.write(len(body).to_bytes(PREFIX_BYTES, "little") + body)
        return cls(name, process, reader, writer)

    async def ready(self) -> Ready:
        """When it can be used, at any later call too. ChildDied if it never can."""
        said = await asyncio.shield(self._saying)
        if isinstance(said, Ready):
            return said
        raise await self.death()

    async def death(self) -> ChildDied:
        """Wait for its end, and tell how it came."""
        how = await self.ended()
        said = await asyncio.shield(self._saying)
        if isinstance(said, NotReady):
            error = said.fault.error()
            return ChildDied(self, error.message, error)
        return ChildDied(self, how)

    async def ended(self) -> str:
        """Wait for its end, and tell how it came."""
        status = await asyncio.shield(self._ending)
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"

    async def end(self) -> None:
        """End it, which its socket's end asks it to do, and wait until it is no more."""
        self._saying.cancel()
        self._writer.close()
        try:
            async with asyncio.timeout(GRACE_S):
                await self.ended()
        except TimeoutError:
            self._process.kill()
            await self.ended()

    async def _first_words(self, reader: asyncio.StreamReader) -> Ready | NotReady | None:
        """None if it ends without any."""
        try:
            length = int.from_bytes(await reader.readexactly(PREFIX_BYTES), "little")
            return from_child(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
