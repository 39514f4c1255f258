"""One child process as its parent sees it: started, ready, and ended, however that comes."""

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mmserve.core.errors import MMServeError
from mmserve.core.wire import PREFIX_BYTES, length_of, prefixed
from mmserve.logs import STACKS_SIGNAL
from mmserve.processes.messages import Alive, FromChild, NotReady, Ready, from_child, to_bytes
from mmserve.processes.pulse import LOOK_S, Patience, Vitals

log = logging.getLogger(__name__)

GRACE_S = 2.0  # for a child to end by itself when its socket has
STACKS_S = 0.5  # for one that hangs to write its stacks before it is killed

# What makes text is quick, and one thread of it enough.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class ChildDied(Exception):
    """A child has ended by itself, or was killed since it hung."""

    def __init__(self, child: "Child", how: str, error: MMServeError | None = None) -> None:
        super().__init__(f"the {child.name} process {child.pid} ended ({how})")
        self.child = child
        self.error = error  # what it said of it


class Child:
    """Made by ``start`` and given back by ``end``; used in one event loop only, but for ``trouble``.

    From ``Ready`` on it is killed when it is silent, or at one step, for longer than ``patience`` has.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: Patience,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._vitals = Vitals(patience, self._loop.time())
        self._killed: asyncio.Future[str] = self._loop.create_future()  # why, when it hung
        self._ending = asyncio.create_task(process.wait())
        self._saying = asyncio.create_task(self._heard())  # its first words
        self._minding = [asyncio.create_task(work) for work in (self._listen(), self._look())]

    @classmethod
    async def start(
        cls,
        name: str,
        folder: str,
        hello: Any,
        *fds: int,
        patience: Patience,
        env: Mapping[str, str] | None = None,
        module: str | None = None,
    ) -> "Child":
        """Run ``module``, or this package's ``name``. It is given the descriptors of a socket to here and of
        ``fds``, this process's id, and the ``folder`` of the sockets, which it removes at this process's end;
        there is none if that is empty."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = (theirs.fileno(), *fds)
            process = await asyncio.create_subprocess_exec(
                # -P: the folder that the server was started in is no place to import from.
                *(sys.executable, "-P", "-m", module or f"mmserve.processes.{name}"),
                *map(str, (*passed, os.getpid(), folder)),
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env=os.environ | (env or {}),
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(prefixed(to_bytes(hello)))
        return cls(name, process, reader, writer, patience)

    async def ready(self) -> Ready:
        """When it can be used, at any later call too. ChildDied if it never can."""
        said = await asyncio.shield(self._saying)
        if isinstance(said, Ready):
            return said
        raise await self.death()

    async def death(self) -> ChildDied:
        """Wait for its end, and tell how it came. One that was killed since it hung may take a while to be no
        more, which is not waited for."""
        await asyncio.wait((self._ending, self._killed), return_when=asyncio.FIRST_COMPLETED)
        if self._killed.done():
            return ChildDied(self, f"killed, since {self._killed.result()}")
        how = await self.ended()
        said = await asyncio.shield(self._saying)
        if isinstance(said, NotReady):
            error = said.fault.error()
            return ChildDied(self, error.message, error)
        return ChildDied(self, how)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._ending.done()

    @property
    def trouble(self) -> str | None:
        """Why it is not relied on at this moment; None if it is. On any thread."""
        trouble = self._vitals.trouble
        return None if trouble is None else f"the {self.name} process {self.pid} {trouble}"

    async def ended(self) -> str:
        """Wait until it is no more, and tell how its end came."""
        status = await asyncio.shield(self._ending)
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"

    async def end(self) -> None:
        """End it, which its socket's end asks it to do, and wait until it is no more."""
        for task in self._minding:
            task.cancel()
        self._writer.close()  # which ends ``_saying`` too: who waits for ``ready`` is told of this end
        try:
            async with asyncio.timeout(GRACE_S):
                await self.ended()
        except TimeoutError:
            self._process.kill()
            await self.ended()

    # ------------------------------------------------------------ what it says

    async def _heard(self) -> FromChild | None:
        """What it says next; None when it says no more."""
        try:
            length = length_of(await self._reader.readexactly(PREFIX_BYTES))
            return from_child(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def _listen(self) -> None:
        """To its signs of life, which begin when it is ready."""
        await asyncio.shield(self._saying)
        while isinstance(sign := await self._heard(), Alive):
            self._vitals.hear(sign, self._loop.time())

    # ------------------------------------------------------------ when it hangs

    async def _look(self) -> None:
        """After it as soon as it is ready, and kill it when it hangs."""
        if not isinstance(await asyncio.shield(self._saying), Ready):
            return
        told = False
        while not self._ending.done():
            if why := self._vitals.look(self._loop.time()):
                return await self._kill(why)
            trouble = self.trouble
            if told != bool(trouble):
                log.warning(trouble or f"the {self.name} process {self.pid} gives signs of life again")
            told = bool(trouble)
            await asyncio.sleep(LOOK_S)

    async def _kill(self, why: str) -> None:
        """A stopped process writes no stacks, but can be killed."""
        log.error(
            "the %s process %d is killed, since %s; the stacks of its threads:", self.name, self.pid, why
        )
        with suppress(ProcessLookupError):
            self._process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_S)
            self._process.kill()
        self._killed.set_result(why)
