"""Starts the engine and the detokenizer, watches over them, and starts them again when they end.

supervisor (a thread of the api) ── a life of an engine: start, load, meet, serve, end
                                      └── lives of detokenizers, one after the other
"""

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from mmserve.core.arena import Arena
from mmserve.core.config import Config
from mmserve.core.errors import ConfigError, EngineDead, EngineRestarting, MMServeError
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.processes.child import ONE_THREAD, Child, ChildDied
from mmserve.processes.client import Client
from mmserve.processes.messages import DetokenizerHello, EngineHello, Hello
from mmserve.processes.pulse import Patience

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_DEATHS, DEATHS_S = 3, 600.0  # more within this time, and there is no use in going on
ROOM = 2  # so many times the requests that an engine takes are sent to it at most
LONGEST_FOLDER = 90  # bytes of its path; that of a socket in it may have 107


class GaveUp(Exception):
    """The processes will not be started again."""


class Supervisor:
    """A thread with an event loop of its own, in which everything happens that is no caller's.

    ``started`` is done when requests are answered for the first time, with an MMServeError if they never
    will be; ``failed`` when the supervisor has given up after that, with the reason.
    """

    def __init__(self, config: Config, spec: ProcessorSpec, arena: Arena) -> None:
        self.started: Future[None] = Future()
        self.failed: Future[str] = Future()
        self.lives = 0  # times that requests began to be answered
        self.restarts = 0
        self._config = config
        self._spec = spec
        self._arena = arena
        self._patience = Patience(config.server.hang_timeout_s, config.server.step_timeout_s)
        self._serving: tuple[Child, ...] = ()  # that answer requests, while the client is open
        self._deaths: deque[float] = deque()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        scheduler = config.scheduler
        most = ROOM * (scheduler.max_running + scheduler.max_waiting)
        self.client = Client(self._loop, arena, most)
        self._thread = threading.Thread(target=self._live, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the processes; who still waits is told. Twice is once."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    @property
    def trouble(self) -> str | None:
        """Why requests are not answered at this moment; None while they are. On any thread."""
        if not self.client.open:
            return self.client.refusal
        return next(filter(None, (child.trouble for child in self._serving)), None)

    # ------------------------------------------------------------ the thread

    def _live(self) -> None:
        # Children inherit the mask: ctrl-C, and a SIGTERM to the whole group, are for the api alone, which
        # ends them when what they are at is finished.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._work())

    async def _work(self) -> None:
        lives = asyncio.create_task(self._supervise())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((lives, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (lives, stopping):
            task.cancel()
        [reason, _] = await asyncio.gather(lives, stopping, return_exceptions=True)
        self._conclude(reason)

    def _conclude(self, reason: object) -> None:
        """Nobody may wait for what will never come."""
        if isinstance(reason, Exception) and not isinstance(reason, GaveUp | MMServeError):
            log.error("the supervisor failed", exc_info=reason)
        stopped = not isinstance(reason, Exception)
        why = "the engine was stopped" if stopped else str(reason)
        self.client.close(EngineDead(why))
        self.client.end()
        if not self.started.done():
            self.started.set_exception(reason if isinstance(reason, MMServeError) else EngineDead(why))
        elif not stopped:
            self.failed.set_result(why)

    # ------------------------------------------------------------ lives

    async def _supervise(self) -> None:
        while True:
            try:
                await self._engine_life()
            except ChildDied as death:
                self._mourn(death)

    async def _engine_life(self) -> None:
        """From the start of an engine to its death, which is raised."""
        with sockets() as folder:
            hello = EngineHello(
                config=self._config,
                eos_ids=self._spec.eos_ids,
                tokenizer_json=self._spec.tokenizer_json,
                arena_bytes=self._arena.total,
                listen=f"ipc://{folder}/engine",
            )
            try:
                async with self._child("engine", folder, hello, self._arena.fd) as engine:
                    await self._detokenizer_life(engine, folder, hello.listen)
                    while True:
                        with sockets() as another:
                            await self._detokenizer_life(engine, another)
            finally:
                self.client.forget_engine()

    @asynccontextmanager
    async def _child(
        self, name: str, folder: str, hello: Hello, *fds: int, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[Child]:
        """A child process inside the block; see ``Child.start``."""
        one = await Child.start(name, folder, hello, *fds, patience=self._patience, env=env)
        try:
            yield one
        finally:
            await one.end()

    async def _detokenizer_life(self, engine: Child, folder: str, listen: str | None = None) -> None:
        """From the start of a detokenizer to its death. ChildDied if it is the engine's, or comes before
        requests were answered. ``listen`` is where an engine listens that is new too."""
        hello = DetokenizerHello(
            self._spec.tokenizer_json, f"ipc://{folder}/detokenizer", f"ipc://{folder}/api"
        )
        with self.client.listening(hello.speak):
            async with self._child("detokenizer", folder, hello, env=ONE_THREAD) as detokenizer:
                await living(self._meet(engine, detokenizer, hello, listen), engine, detokenizer)
                shutil.rmtree(folder)  # all are connected: nobody needs the names of the sockets any more
                self._open(engine, detokenizer)
                try:
                    await living(asyncio.Event().wait(), engine, detokenizer)
                except ChildDied as death:
                    self.client.close(EngineRestarting(f"{death}; it is being started again: try again soon"))
                    if death.child is engine:
                        raise
                    self._mourn(death)

    async def _meet(
        self, engine: Child, detokenizer: Child, hello: DetokenizerHello, listen: str | None
    ) -> None:
        """Connect the processes, which are being started."""
        (told, _) = await asyncio.gather(engine.ready(), detokenizer.ready())
        if listen is not None:
            self.client.connect(listen)
            for line in told.told:
                log.info(line)
        await self.client.meet(hello.listen)

    def _open(self, engine: Child, detokenizer: Child) -> None:
        """Requests are answered from now on."""
        log.info(
            "processes: %d serves, %d runs the model, %d makes text of its tokens",
            *(os.getpid(), engine.pid, detokenizer.pid),
        )
        self.lives += 1
        self._serving = engine, detokenizer
        self.client.open = True
        if not self.started.done():
            self.started.set_result(None)

    def _mourn(self, death: ChildDied) -> None:
        """Return if what died is to be started again."""
        if not self.started.done():
            raise death.error or GaveUp(f"{death} before it was ready; the log tells why")
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_S:
            self._deaths.popleft()
        if len(self._deaths) > MOST_DEATHS:
            minutes = DEATHS_S / 60
            raise GaveUp(f"{death}, the {len(self._deaths)}th such end within {minutes:g} minutes")
        self.restarts += 1
        log.error("%s; it is started again", death)


async def living(work: Coroutine[Any, Any, T], *children: Child) -> T:
    """The result of ``work``; ChildDied, with ``work`` cancelled, when a child ends before."""
    task = asyncio.ensure_future(work)
    deaths = [asyncio.ensure_future(one.death()) for one in children]
    try:
        await asyncio.wait((task, *deaths), return_when=asyncio.FIRST_COMPLETED)
        for death in deaths:
            if death.done():
                raise death.result()
        return task.result()
    finally:
        for job in (task, *deaths):
            job.cancel()
        await asyncio.gather(task, *deaths, return_exceptions=True)


@contextmanager
def sockets() -> Iterator[str]:
    """A folder for sockets that nobody else may enter. It is removed at the end, if it is still there."""
    folder = tempfile.mkdtemp(prefix="mmserve-ipc-")
    try:
        if len(folder) > LONGEST_FOLDER:
            raise ConfigError(f"the path of temporary files is too long for sockets: {folder}; set TMPDIR")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
