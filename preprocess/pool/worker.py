"""A worker process: one job at a time, from the keeper's socket, into the keeper's arena.

    python -m mmserve.preprocess.pool.worker SOCKET_FD ARENA_FD PARENT_PID

It decodes files from strangers, so it is made to be lost: it holds no books and no pixels of its own,
and whatever becomes of it costs the one item it is at. It never loads torch.
"""

import logging
import os
import resource
import select
import socket
import sys
import warnings
from collections.abc import Callable

import numpy as np

from mmserve.core.arena import Window
from mmserve.core.errors import InvalidRequest, MediaError, MMServeError
from mmserve.core.wire import Fault, die_with, receive
from mmserve.preprocess.media import Medium, without_pixels
from mmserve.preprocess.pool.bulk import loaded
from mmserve.preprocess.pool.messages import (
    Bulk,
    Cancel,
    Denied,
    Failed,
    FromWorker,
    GaveUp,
    Glance,
    Glanced,
    Granted,
    Hello,
    LaidOut,
    LayOut,
    Need,
    Ready,
    See,
    Seen,
    Slot,
    ToWorker,
    to_bytes,
    to_worker,
)
from mmserve.preprocess.work import Cancelled, Work

log = logging.getLogger(__name__)


class Channel:
    """The worker's end of the socket; the process ends when the keeper's end is closed."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def send(self, message: FromWorker) -> None:
        self._socket.sendall(to_bytes(message))

    def receive(self) -> ToWorker:
        try:
            body = receive(self._socket)
        except EOFError:
            os._exit(0)  # the keeper has gone; there is nobody to tidy up for
        return to_worker(body)

    @property
    def waiting(self) -> bool:
        """Whether a message has begun to arrive."""
        return bool(select.select([self._socket], [], [], 0)[0])


class Worker:
    """Does jobs until its keeper goes."""

    def __init__(self, channel: Channel, window: Window, hello: Hello) -> None:
        self.channel = channel
        self.window = window
        self.limit_mib = hello.memory_bytes >> 20
        self.do = self._writer(hello) if hello.writes else self._eye(hello)

    def run(self) -> None:
        self.channel.send(Ready())
        while True:
            job = self.channel.receive()
            if not isinstance(job, Cancel):  # else it came too late
                self.channel.send(self._outcome(job))

    def _outcome(self, job: ToWorker) -> FromWorker:
        try:
            return self.do(job)
        except Cancelled:
            return GaveUp(memory_held())
        except MMServeError as error:
            return Failed(Fault.of(error), memory_held())
        except MemoryError:
            return Failed(Fault.of(self._too_much(job)), memory_held())
        except Exception:
            log.exception("a fault in preprocessing")
            return Failed(Fault.of(MMServeError("preprocessing failed")), memory_held())

    def _too_much(self, job: ToWorker) -> MMServeError:
        said = f"it takes more memory than a worker may use ({self.limit_mib} MiB, worker_memory_mib)"
        if isinstance(job, See | Glance):
            param = job.part.param if isinstance(job, See) else None
            return MediaError(said, param=param, code="too_much_memory")
        return InvalidRequest(said, param="messages", code="too_much_memory")

    def _eye(self, hello: Hello) -> Callable[[ToWorker], FromWorker]:
        from mmserve.preprocess.eye import Eye

        eye = Eye(hello.spec, hello.media)

        def see(job: ToWorker) -> Seen | Glanced:
            if isinstance(job, Glance):
                return Glanced(eye.glance(self._file(job.bulk)), memory_held())
            assert isinstance(job, See)
            canvas = Canvas(self, job.job)
            medium = eye.see(loaded(job.part, job.bulk, self.window), Work(canvas.allocate, canvas.check))
            return Seen(without_pixels(medium), canvas.slots(medium), memory_held())

        return see

    def _file(self, bulk: Bulk) -> bytes:
        return bytes(self.window.memory(bulk.offset, bulk.nbytes))

    def _writer(self, hello: Hello) -> Callable[[ToWorker], FromWorker]:
        from mmserve.preprocess.writer import Writer

        writer = Writer(hello.spec)
        pieces = writer.text.pieces

        def lay_out(job: ToWorker) -> LaidOut:
            assert isinstance(job, LayOut)
            hits, misses = pieces.hits, pieces.misses
            prompt = writer.lay_out(job.chat, job.media)
            return LaidOut(prompt, pieces.hits - hits, pieces.misses - misses, memory_held())

        return lay_out


class Canvas:
    """The memory that one job's pixels go to, granted by the keeper."""

    def __init__(self, worker: Worker, job: int) -> None:
        self._channel = worker.channel
        self._window = worker.window
        self._job = job
        self._address = 0  # of the grant; 0 before there is one

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """Ask the keeper for the pixels' memory, once. Cancelled if it is denied or nobody waits."""
        if self._address:
            raise ValueError("the pixels of one job are one allocation")
        self._channel.send(Need(int(np.prod(shape))))
        while True:
            match self._channel.receive():
                case Granted(offset=offset):
                    self._address = self._window.address + offset
                    return self._window.array(offset, shape)
                case Denied():
                    raise Cancelled
                case Cancel(job=job) if job == self._job:
                    self._await_answer()
                    raise Cancelled

    def check(self) -> None:
        """Raise Cancelled if the keeper said so; costs a system call."""
        while self._channel.waiting:
            match self._channel.receive():
                case Cancel(job=job) if job == self._job:
                    raise Cancelled

    def slots(self, medium: Medium) -> tuple[Slot, ...]:
        """Where the pixels of each item stand in the grant."""
        return tuple(self._slot(pixels) for pixels in medium.pixels if pixels is not None)

    def _slot(self, pixels: np.ndarray) -> Slot:
        if not pixels.flags.c_contiguous:
            raise ValueError("an item's pixels must be one piece of memory")
        return Slot(pixels.__array_interface__["data"][0] - self._address, pixels.shape)

    def _await_answer(self) -> None:
        """Read the answer to a Need, so that it is not taken for one to the next job's."""
        while not isinstance(self._channel.receive(), Granted | Denied):
            pass


def memory_held() -> int:
    """Bytes of this process's own memory; pages of the arena are not counted."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * resource.getpagesize()
    except FileNotFoundError:  # not Linux; the most it ever held, which macOS tells in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def limit_memory(nbytes: int) -> None:
    """Allocations beyond it fail. RLIMIT_DATA counts private memory; the arena, a shared mapping that is as
    large as all pixels in flight, is not this worker's to answer for, and RLIMIT_AS would count it."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        nbytes = min(nbytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))


def main(socket_fd: int, arena_fd: int, parent: int) -> None:
    die_with(parent)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what is wrong with a file is told to its sender
    channel = Channel(socket_fd)
    hello = channel.receive()
    assert isinstance(hello, Hello)
    limit_memory(hello.memory_bytes)
    Worker(channel, Window(arena_fd, hello.arena_bytes), hello).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
