"""What a worker is asked to do for a caller, and how the answer comes back."""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np

from mmserve.core.arena import Arena, Block
from mmserve.core.errors import InvalidRequest, MediaError, MMServeError, Overloaded
from mmserve.core.messages import ChatInput, ImagePart
from mmserve.preprocess.media import MediaPart, Medium, without_pixels
from mmserve.preprocess.pool.bulk import luggage, unloaded
from mmserve.preprocess.pool.memory import NoRoom, PixelMemory
from mmserve.preprocess.pool.messages import (
    Denied,
    Failed,
    FromWorker,
    GaveUp,
    Glance,
    Glanced,
    Granted,
    LaidOut,
    LayOut,
    Need,
    See,
    Seen,
)
from mmserve.preprocess.pool.plain import plain_chat
from mmserve.preprocess.pool.process import WorkerGone, WorkerProcess
from mmserve.preprocess.prompt import Prompt

COPY_BYTES = 4 << 20  # copied into the arena between two looks at the other workers

Outcome = Literal["done", "failed", "refused", "overdue", "lost", "cancelled"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
T = TypeVar("T")

_numbers = itertools.count(1)


class Job(ABC, Generic[T]):
    """One question of one caller. But for ``future``, the keeper's loop alone touches it.

    ``seconds`` bounds the wait for a worker and then the work, each; ``deadline`` (``time.monotonic``)
    both together. ``future`` is forgotten when it is answered, so that the answer lives as long as the
    caller wants and no longer.
    """

    what = "it"
    param: str | None = None
    wear = 1.0  # what it counts towards the most jobs of one process

    def __init__(self, request: object, seconds: float, deadline: float | None) -> None:
        self.number = next(_numbers)
        self.request = request
        self.seconds = seconds
        self.deadline = deadline
        self.submitted = self.begun = time.monotonic()
        self.future: Future[T] | None = Future()
        self.outcome: Outcome = "cancelled"
        self.memory_bytes = 0  # of the worker after the job
        self.worker: WorkerProcess | None = None
        self.asked = False  # the worker has been told of it
        self.tried = False  # it had a worker once, and no room for its pixels
        self.timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> bool:
        """Whether the caller went away without an answer."""
        return self.future is not None and self.future.cancelled()

    @property
    def open(self) -> bool:
        """Whether the caller still waits."""
        return self.future is not None and not self.future.cancelled()

    @property
    def start_by(self) -> float:
        return self._sooner(self.submitted + self.seconds)

    def begin(self, worker: WorkerProcess) -> float:
        """Note that ``worker`` has it now; the time at which it is overdue."""
        self.worker, self.tried, self.asked = worker, True, False
        self.begun = time.monotonic()
        self.stop_waiting()
        return self._sooner(self.begun + self.seconds)

    def stop_waiting(self) -> None:
        """No timer ends its wait any more: one that runs would hold the job, and so its file, to the end."""
        if self.timer is not None:
            self.timer.cancel()

    @abstractmethod
    async def run(self, worker: WorkerProcess) -> T | None:
        """Talk with the worker until it is free again; the answer, or None after ``fail``.

        WorkerGone, or NoRoom to be put back in the queue.
        """

    def release(self) -> None:
        """Give back what the job held; its worker does not touch it any more."""
        self.worker = None

    def forget(self) -> None:
        """The request has no more jobs of this kind."""

    # ------------------------------------------------------------ how it ends

    def deliver(self, result: T) -> None:
        future = self._claim()
        if future is not None:
            self.outcome = "done"
            future.set_result(result)

    def fail(self, error: MMServeError, outcome: Outcome = "failed") -> None:
        future = self._claim()
        if future is not None:
            error.param = error.param or self.param
            self.outcome = outcome
            future.set_exception(error)

    def refuse(self, error: Overloaded) -> None:
        self.fail(error, "refused")

    def wait_in_vain(self) -> None:
        waited = time.monotonic() - self.submitted
        self.refuse(Overloaded(f"{self.what} has waited {waited:.1f} s for a worker and memory; try later"))

    def overdue(self) -> None:
        took = time.monotonic() - self.begun
        said = (
            f"{self.what} took {took:.1f} s, longer than prepare_timeout_s or the request's deadline allows"
        )
        self.fail(self._at_fault(said, "media_timeout"), "overdue")

    def lose(self, how: str) -> None:
        """The worker was lost over it."""
        self.fail(self._at_fault(f"the process that worked on it ended ({how})", "worker_lost"), "lost")

    def _at_fault(self, said: str, code: str) -> MMServeError:
        return InvalidRequest(said, code=code)

    def _claim(self) -> Future[T] | None:
        """The future, to be answered now; None if it has been, or if the caller has left."""
        if not self.open:
            return None
        future, self.future = self.future, None
        return future if future is not None and future.set_running_or_notify_cancel() else None

    def _sooner(self, end: float) -> float:
        return end if self.deadline is None else min(end, self.deadline)

    def _finish(self, message: FromWorker) -> None:
        """The endings that all jobs share. WorkerGone when ``message`` is none of them."""
        match message:
            case Failed(fault=fault, memory_bytes=held):
                self.memory_bytes = held
                self.fail(fault.error())
            case GaveUp(memory_bytes=held):
                self.memory_bytes = held
            case _:
                raise WorkerGone


class MediaJob(Job[T]):
    """About one part, whose encoded bytes the worker finds in ``_input``, a block that the job owns while it
    runs."""

    what = "the picture or clip"

    def __init__(
        self, part: MediaPart, memory: PixelMemory, request: object, seconds: float, deadline: float | None
    ) -> None:
        super().__init__(request, seconds, deadline)
        self.param = part.param
        self.part = unloaded(part)
        self.memory = memory
        self.luggage = luggage(part)
        self.needs = self.luggage.nbytes  # grows when more becomes known
        self._input: Block | None = None

    @property
    def _arena(self) -> Arena:
        return self.memory.arena

    async def _loaded(self) -> Block | None:
        """The block with the encoded bytes in it; None where there is nobody to go on for."""
        try:
            block = self._input = self.memory.take(self.request, self.luggage.nbytes)
        except MMServeError as error:
            self._refused(error)
            return None
        await self._fill(block)
        return None if self.left else block

    def release(self) -> None:
        super().release()
        if self._input is not None:
            self._arena.release(self._input)
        self._input = None

    def forget(self) -> None:
        self.memory.forget(self.request)

    async def _fill(self, block: Block) -> None:
        """Copy the luggage into its block, piece by piece, so that other workers are not kept waiting."""
        at = 0
        for _, data, _ in self.luggage.entries:
            for start in range(0, len(data), COPY_BYTES):
                piece = memoryview(data)[start : start + COPY_BYTES]
                self._arena.write(block, piece, at)
                at += len(piece)
                if len(piece) == COPY_BYTES:
                    await asyncio.sleep(0)

    def _refused(self, error: MMServeError) -> None:
        self.fail(error, "refused" if isinstance(error, Overloaded) else "failed")

    def _at_fault(self, said: str, code: str) -> MMServeError:
        return MediaError(said, code=code)


class SeeJob(MediaJob[Medium]):
    """Decode and resize one part.

    Owned by the job while it runs, too: ``_pixels``, the block that was granted. Arrays of the result hold
    references of their own, so it is given back in ``release``.
    """

    _pixels: Block | None = None
    _no_room = False

    async def run(self, worker: WorkerProcess) -> Medium | None:
        block = await self._loaded()
        if block is None:
            return None
        self.asked = True
        worker.send(See(self.number, self.part, self.luggage.places(block.offset)))
        while True:
            match await worker.receive():
                case Need(nbytes=nbytes):
                    worker.send(self._answer(nbytes))
                case Seen() as seen:
                    self.memory_bytes = seen.memory_bytes
                    return self._medium(seen)
                case message:
                    self._finish(message)
                    if self._no_room:
                        raise NoRoom
                    return None

    def release(self) -> None:
        super().release()
        if self._pixels is not None:
            self._arena.release(self._pixels)
        self._pixels = None

    def _answer(self, nbytes: int) -> Granted | Denied:
        assert self._input is not None
        self._no_room = False
        self.needs = nbytes + self.luggage.nbytes
        try:
            self._pixels = self.memory.take(self.request, nbytes, beside=self._input.nbytes)
        except NoRoom:
            self._no_room = True
        except MMServeError as error:
            self._refused(error)
        else:
            self.memory.hold(self.request, nbytes)
            return Granted(self._pixels.offset)
        return Denied()

    def _medium(self, seen: Seen) -> Medium:
        """The result over the arena's own memory. ValueError if the worker tells of other places."""
        if self._pixels is None:
            raise ValueError("pixels that were not granted")
        end = max(slot.at + _size(slot.shape) for slot in seen.slots)
        self._pixels = self._arena.trim(self._pixels, end)
        pixels = tuple(self._arena.view(self._pixels, slot.shape, slot.at) for slot in seen.slots)
        if len(pixels) != len(seen.medium.digests) or len(seen.medium.kept) not in (0, len(pixels)):
            raise ValueError("pixels, digests and kept cells of different numbers")
        stages = {"queue": self.begun - self.submitted, **seen.medium.stages}
        return replace(seen.medium, pixels=pixels, stages=stages)


class GlanceJob(MediaJob[np.ndarray]):
    """The luma thumbnail of one encoded picture: a small job, of which a camera brings many."""

    what = "the frame"
    wear = 0.02

    def __init__(self, data: bytes, memory: PixelMemory, request: object, seconds: float) -> None:
        super().__init__(ImagePart(data=data), memory, request, seconds, None)

    async def run(self, worker: WorkerProcess) -> np.ndarray | None:
        block = await self._loaded()
        if block is None:
            return None
        self.asked = True
        (bulk,) = self.luggage.places(block.offset)
        worker.send(Glance(self.number, bulk))
        match await worker.receive():
            case Glanced() as done:
                self.memory_bytes = done.memory_bytes
                return done.luma
            case message:
                self._finish(message)
                return None


class LayOutJob(Job[Prompt]):
    """Lay out one prompt. ``pieces`` counts what was tokenised before."""

    what = "the prompt"
    param = "messages"

    def __init__(
        self, chat: ChatInput, media: Sequence[Medium], pieces: Counter[str], seconds: float
    ) -> None:
        super().__init__(chat.request_id, seconds, chat.deadline)
        self.pieces = pieces
        self.chat = plain_chat(chat)
        self.media = tuple(map(without_pixels, media))

    async def run(self, worker: WorkerProcess) -> Prompt | None:
        self.asked = True
        worker.send(LayOut(self.number, self.chat, self.media))
        match await worker.receive():
            case LaidOut() as done:
                self.memory_bytes = done.memory_bytes
                self.pieces.update(hits=done.hits, misses=done.misses)
                stages = {"queue": self.begun - self.submitted, **done.prompt.stages}
                return replace(done.prompt, stages=stages)
            case message:
                self._finish(message)
                return None


AnyJob = Job[Any]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
