"""The device seam: what the runner and the encoder stage ask of a CPU or a GPU.

The CPU is a first-class implementation, not a patched GPU: its streams run at once and its events
are always done, so the same discipline (static buffers, who waits for whom) runs and is tested
everywhere. Tensors are typed ``Any`` here because this package does not import torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

STEPS, ENCODER = "steps", "encoder"  # families of graphs
FIRST, LAST = -1, 0  # priorities of streams: steps of the language model, pictures


class Event(Protocol):
    """A point in a stream's work. One that was never recorded has happened."""

    def record(self, stream: "Stream") -> None: ...
    def wait(self, stream: "Stream") -> None:
        """Later work of ``stream`` starts only after this event; the host does not block."""

    def synchronize(self) -> None:
        """Block the host until the event has happened."""

    def done(self) -> bool: ...


class Stream(Protocol):
    """An ordered queue of device work; ``with stream.use():`` sends new work to it."""

    def use(self) -> AbstractContextManager[None]: ...


class Graph(Protocol):
    """A captured forward over static buffers; ``replay`` reads nothing else."""

    def replay(self) -> None: ...


@dataclass
class GraphCosts:
    """What captures have taken: how many there were, their seconds, and bytes of the device's memory."""

    graphs: int = 0
    seconds: float = 0.0
    nbytes: int = 0


class Timer(Protocol):
    """How long a stretch of the current stream's work takes on the device."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def seconds(self) -> float:
        """To be asked when the work behind ``stop`` is done."""


class Device(Protocol):
    """A place where models run. ``synchronous``: what is launched is done when the call returns, so there is
    nothing to wait for, and nothing runs beside anything else."""

    name: str
    torch_device: Any
    synchronous: bool

    def stream(self, priority: int = 0) -> Stream:
        """A new queue. Where the device can choose, work of a *lower* ``priority`` number goes first."""

    def current(self) -> Stream:
        """The queue that new work of this thread goes to."""

    def event(self) -> Event: ...
    def timer(self, clock: Callable[[], float]) -> Timer:
        """By ``clock`` where the device has none of its own."""

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A host tensor that the device can copy from asynchronously (plain memory on a CPU)."""

    def copy(self, target: Any, source: Any) -> None:
        """``target`` becomes ``source`` in the order of the current stream; the host does not wait. Neither
        may be touched by the host before an event behind it has happened."""

    def pin(self, address: int, nbytes: int) -> None:
        """Host memory that others made is pinned from now on, for ever, if that can be had; the log says if
        not, and why. Nothing to be had on a CPU."""

    def keep_for(self, tensor: Any, stream: Stream) -> None:
        """``tensor`` is read by ``stream``, too, beside the one in which it was made: when it is freed, its
        memory waits for both."""

    def capture(self, forward: Callable[[], None], family: str = STEPS) -> Graph:
        """Record ``forward`` over static buffers, or on a device without graphs keep it to call again. Graphs
        of one ``family`` share their memory, so one of them runs at a time; those of two may overlap. It has
        run once when this returns."""

    def graph_costs(self) -> "GraphCosts":
        """What the captures so far have taken."""

    def total_memory(self) -> int:
        """Bytes of all its memory."""

    def peak(self, work: Callable[[], None]) -> int:
        """Bytes that ``work`` took at its worst, beside what was held before."""

    def free_memory(self) -> int:
        """Bytes that an allocation could still get."""

    def give_back(self) -> None:
        """Let go of memory that is kept for later allocations of the same kind."""
