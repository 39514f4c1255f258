"""Keeps worker processes at work: who does what next, for how long, and what happens when one is lost."""

import asyncio
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from mmserve.core.errors import MMServeError, WorkersDead
from mmserve.preprocess.pool.fair import FairQueue
from mmserve.preprocess.pool.jobs import AnyJob, Job
from mmserve.preprocess.pool.memory import NoRoom, PixelMemory
from mmserve.preprocess.pool.messages import Cancel
from mmserve.preprocess.pool.process import WorkerGone, WorkerProcess
from mmserve.preprocess.seats import Seats

log = logging.getLogger(__name__)
T = TypeVar("T")

START_S = 120.0  # for a process to start and say so, on a busy machine
TRIES = 3  # workers in a row that may fail to start before callers are told
LONGEST_PAUSE_S = 10.0  # between two tries
MOST_JOBS = 10_000  # of one process (see ``Job.wear``); what leaks in a decoder, leaks away with it
MOST_HELD = 0.5  # of its memory ceiling, between two jobs
CLOSED = "the preprocessing workers were closed"


class Crew:
    """Workers of one kind, and the jobs that wait for them.

    ``hello`` is what each is greeted with; at most ``limit`` requests are let in; ``may_begin`` holds a job
    back while it says no.
    """

    def __init__(
        self,
        name: str,
        size: int,
        hello: bytes,
        limit: int,
        may_begin: Callable[[AnyJob], bool] = lambda job: True,
    ) -> None:
        self.name = name
        self.size = size
        self.hello = hello
        self.may_begin = may_begin
        self.queue: FairQueue[AnyJob] = FairQueue()
        self.seats = Seats(limit)
        self.workers: list[WorkerProcess] = []
        self.started = False
        self.fault = ""  # why there are no workers

    def admit(self, job: AnyJob) -> None:
        """Let ``job`` in; WorkersDead or Overloaded if it cannot be."""
        if self.fault:
            raise WorkersDead(self.fault)
        self.seats.take(job.request)


class Keeper:
    """A thread with an event loop of its own, so that callers may stand in any loop.

    All that changes, changes in that loop: ``submit`` and the ends of futures only send word there. Each
    worker has one coroutine, ``_work``, which is its whole life.
    """

    def __init__(self, memory: PixelMemory, crews: tuple[Crew, ...], memory_bytes: int) -> None:
        self.memory = memory
        self.crews = crews
        self.started: Future[None] = Future()  # an exception if no worker starts
        self.outcomes: Counter[str] = Counter()
        self.lost = self.recycled = 0  # workers that were replaced
        self._most_held = int(memory_bytes * MOST_HELD)
        self._closed = False
        self._door = threading.Lock()  # of ``_closed``: who came before it was set is told what became of it
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._news = asyncio.Event()  # set for a moment when a worker may find a job that it could not before
        self._thread = threading.Thread(target=self._live, name="keeper", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called from any thread

    @property
    def ready(self) -> bool:
        return not self._closed and all(crew.started and not crew.fault for crew in self.crews)

    def submit(self, crew: Crew, job: Job[T]) -> Future[T]:
        """Put ``job`` into the queue of ``crew``; the future tells what comes of it."""
        future = job.future
        with self._door:
            if self._closed or future is None:
                raise WorkersDead(CLOSED)
            self._tell(partial(self._enter, crew, job))
        return future

    def ring(self) -> None:
        """Memory has come back: who waits may look again."""
        self._tell(self._ring)

    def close(self) -> None:
        """End all workers; jobs that are not done fail. Twice is once."""
        self._tell(self._closing.set)
        self._thread.join()

    def _tell(self, word: Callable[[], Any]) -> bool:
        try:
            self._loop.call_soon_threadsafe(word)
        except RuntimeError:  # the loop was closed
            return False
        return True

    # ------------------------------------------------------------ workers

    def _live(self) -> None:
        # Workers inherit the mask: ctrl-C, and a SIGTERM to the whole group, are for the server alone, which
        # ends its workers when it has finished what they are at.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._keep())

    async def _keep(self) -> None:
        lives = [asyncio.create_task(self._work(crew)) for crew in self.crews for _ in range(crew.size)]
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait([*lives, closing], return_when=asyncio.FIRST_COMPLETED)
        with self._door:
            self._closed = True
        for task in (*lives, closing):
            task.cancel()
        for result in await asyncio.gather(*lives, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("the keeper of the preprocessing workers failed", exc_info=result)
        for crew in self.crews:
            self._fail_waiting(crew, CLOSED)
        if not self.started.done():
            self.started.set_exception(WorkersDead(CLOSED))

    async def _work(self, crew: Crew) -> None:
        """The life of one worker, and of those that replace it."""
        while True:
            worker = await self._start(crew)
            try:
                await self._serve(crew, worker)
            finally:
                crew.workers.remove(worker)
                self._note_end(worker, worker.alive, await worker.end())

    async def _serve(self, crew: Crew, worker: WorkerProcess) -> None:
        """Job after job, until the worker is lost or has grown old. Nothing of a job outlives it here."""
        worn = 0.0
        while worn < MOST_JOBS:
            wear = await self._serve_next(crew, worker)
            if wear is None:
                return
            worn += wear

    async def _serve_next(self, crew: Crew, worker: WorkerProcess) -> float | None:
        """One job; its wear, or None where the worker is not good for another."""
        job = await self._next(crew, worker)
        if job is None:
            return None
        await self._do(crew, worker, job)
        return job.wear if job.memory_bytes <= self._most_held else None

    async def _next(self, crew: Crew, worker: WorkerProcess) -> AnyJob | None:
        """The next job in turn; None when the worker has ended."""
        while worker.alive:
            job = crew.queue.take(crew.may_begin)
            if job is not None:
                return job
            await self._news.wait()
        return None

    async def _do(self, crew: Crew, worker: WorkerProcess, job: AnyJob) -> None:
        """One job on one worker, under its deadline; whatever happens is the job's own affair."""
        waits, answer = False, None
        try:
            async with asyncio.timeout_at(job.begin(worker)):
                answer = await job.run(worker)
        except TimeoutError:
            job.overdue()
            if job.asked:
                await worker.stop(job.number)
        except WorkerGone:
            job.lose(await worker.end())
        except NoRoom:
            waits = True
        except asyncio.CancelledError:
            job.fail(WorkersDead(CLOSED))
            raise
        except Exception:
            log.exception("a fault in preprocessing")
            job.fail(MMServeError("preprocessing failed"))
            await worker.end()
        finally:
            job.release()
        if waits:
            self._wait(crew, job)
        elif answer is not None:
            job.deliver(answer)  # when all that the job alone had held is free again

    async def _start(self, crew: Crew) -> WorkerProcess:
        """A worker that is ready. One that cannot start is tried again, ever more slowly."""
        failures = 0
        while True:
            worker, how = await self._try_to_start(crew)
            if worker is not None:
                self._welcome(crew, worker)
                return worker
            failures += 1
            log.error("a preprocessing worker did not start: %s", how)
            if failures >= TRIES and not crew.workers:
                self._despair(crew, f"the {crew.name} workers do not start ({how}); the log tells why")
            await asyncio.sleep(min(2**failures / 4, LONGEST_PAUSE_S))

    async def _try_to_start(self, crew: Crew) -> tuple[WorkerProcess | None, str]:
        try:
            worker = await WorkerProcess.start(crew.hello, self.memory.arena, self._ring)
        except OSError as error:
            return None, str(error)
        ready = False
        how = "it does not answer"
        try:
            ready = await worker.ready(START_S)
        finally:
            if not ready:
                how = await worker.end()
        return (worker, "") if ready else (None, how)

    def _welcome(self, crew: Crew, worker: WorkerProcess) -> None:
        crew.workers.append(worker)
        crew.started, crew.fault = True, ""
        if all(crew.started for crew in self.crews) and not self.started.done():
            self.started.set_result(None)

    def _despair(self, crew: Crew, fault: str) -> None:
        crew.fault = fault
        self._fail_waiting(crew, fault)
        if not self.started.done():
            self.started.set_exception(WorkersDead(fault))

    def _note_end(self, worker: WorkerProcess, was_alive: bool, how: str) -> None:
        if self._closed:
            return
        if was_alive:
            self.recycled += 1
        else:
            self.lost += 1
            log.warning("preprocessing worker %d ended (%s); another takes its place", worker.pid, how)

    # ------------------------------------------------------------ jobs

    def _enter(self, crew: Crew, job: AnyJob) -> None:
        try:
            crew.admit(job)
        except MMServeError as error:
            job.fail(error, "refused")
            self.outcomes[job.outcome] += 1
            return
        # Called wherever the future ends, which is the caller's thread if it is cancelled.
        if job.future is not None:
            job.future.add_done_callback(lambda _: self._tell(partial(self._leave, crew, job)))
        self._wait(crew, job)

    def _wait(self, crew: Crew, job: AnyJob) -> None:
        """Into the queue; one that was there before stands first among its own request's."""
        if not job.open:
            return
        put = crew.queue.put_back if job.tried else crew.queue.put
        put(job.request, job)
        job.timer = self._loop.call_at(job.start_by, self._expire, crew, job)
        self._ring()

    def _expire(self, crew: Crew, job: AnyJob) -> None:
        if crew.queue.drop(job.request, job):
            job.wait_in_vain()

    def _leave(self, crew: Crew, job: AnyJob) -> None:
        """A job has ended, by a result, an error, or because its caller left."""
        self.outcomes[job.outcome] += 1
        crew.seats.leave(job.request)
        if job.request not in crew.seats:
            job.forget()
        crew.queue.drop(job.request, job)
        job.stop_waiting()
        if job.left and job.worker is not None:
            job.worker.send(Cancel(job.number))
        self._ring()

    def _fail_waiting(self, crew: Crew, why: str) -> None:
        for job in list(crew.queue):
            crew.queue.drop(job.request, job)
            job.fail(WorkersDead(why))

    def _ring(self) -> None:
        self._news.set()
        self._news.clear()
