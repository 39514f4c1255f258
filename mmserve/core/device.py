"""The device seam: what the runner and the encoder stage ask of a CPU or a GPU.

The CPU is a first-class implementation, not a patched GPU: its streams run at once and its events
are always done, so the same discipline (static buffers, who waits for whom) runs and is tested
everywhere. Tensors are typed ``Any`` here because this package does not import torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Event(Protocol):
    """A point in a stream's work."""

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


class Device(Protocol):
    """A place where models run."""

    name: str
    torch_device: Any

    def stream(self, priority: int = 0) -> Stream: ...
    def event(self) -> Event: ...
    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A host tensor that the device can copy from asynchronously (plain memory on a CPU)."""

    def capture(self, forward: Callable[[], None]) -> Graph:
        """Record ``forward`` over static buffers, or on a device without graphs keep it to call again."""

    def free_memory(self) -> int:
        """Bytes that an allocation could still get."""
