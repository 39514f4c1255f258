"""Small arrays on their way between host and device, without the host's waiting for either way.

Copies are asynchronous only from and to pinned memory, and such memory may be touched again only when the
copy has happened, which an event tells. On a CPU all of this is a plain copy.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmserve.core.device import Device, Event

Fill = Callable[[torch.Tensor, npt.NDArray[np.generic]], None]

HALF_BYTES = 64 << 10  # what a turn uploads at first; more where it turns out to be too little
ALIGNMENT = 64
FETCH_BYTES = 4096  # of a buffer, at least


class Staging:
    """Host arrays to tensors of the device, in turns.

        turn n       |-- half 0: written, copied --| event 0
        turn n + 1                                  |-- half 1: written, copied --| event 1
        turn n + 2   waits for event 0, then writes half 0 again

    So the copies of one turn may still be under way while the next one is written; with one step in flight at
    most, the wait is for something that has happened long ago.
    """

    def __init__(self, device: Device, nbytes: int = HALF_BYTES) -> None:
        self.device = device
        self._halves = [_Half(device, nbytes), _Half(device, nbytes)]

    @contextmanager
    def turn(self) -> Iterator[Fill]:
        """``fill(target, values)`` within: ``target`` on the device becomes ``values``, cast to its dtype, in
        the order of the current stream. ``values`` may be changed when it returns."""
        if self.device.synchronous:
            yield _fill_at_once
            return
        half = self._halves[0]
        self._halves.reverse()
        half.begin()
        try:
            yield half.fill
        finally:
            half.end()


class _Half:
    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._event = device.event()
        self._memory = device.pinned((nbytes,), torch.uint8)
        self._outgrown: list[torch.Tensor] = []  # read by copies of this turn
        self._used = 0

    def begin(self) -> None:
        self._event.synchronize()
        self._outgrown.clear()
        self._used = 0

    def fill(self, target: torch.Tensor, values: npt.NDArray[np.generic]) -> None:
        staged = _as(self._place(target.numel() * target.element_size()), target)
        staged.copy_(torch.from_numpy(values))
        self._device.copy(target, staged)

    def end(self) -> None:
        self._event.record(self._device.current())

    def _place(self, nbytes: int) -> torch.Tensor:
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > len(self._memory):
            self._outgrown.append(self._memory)
            self._memory = self._device.pinned((2 * max(len(self._memory), nbytes),), torch.uint8)
            start = 0
        self._used = start + nbytes
        return self._memory[start : self._used]


def _fill_at_once(target: torch.Tensor, values: npt.NDArray[np.generic]) -> None:
    target.copy_(torch.from_numpy(values))


class Fetches:
    """Tensors of the device to host arrays. A buffer is used again when its copy was waited for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.free: list[torch.Tensor] = []  # pinned bytes that no copy writes to
        self.waited_seconds = 0.0  # of the host, for copies and all that stood before them

    def start(self, tensors: Sequence[torch.Tensor]) -> "Fetched":
        """Begin to copy ``tensors``, behind what the current stream has to do."""
        buffers = [self._buffer(t.numel() * t.element_size()) for t in tensors]
        views = [_as(b, t) for b, t in zip(buffers, tensors, strict=True)]
        for view, tensor in zip(views, tensors, strict=True):
            self.device.copy(view, tensor)
        event = self.device.event()
        event.record(self.device.current())
        return Fetched(self, event, buffers, views)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        for index, buffer in enumerate(self.free):
            if len(buffer) >= nbytes:
                return self.free.pop(index)
        return self.device.pinned((max(nbytes, FETCH_BYTES),), torch.uint8)


class Fetched:
    """Copies that were begun, and all that stood before them in their stream."""

    def __init__(
        self, owner: Fetches, event: Event, buffers: list[torch.Tensor], views: list[torch.Tensor]
    ) -> None:
        self._owner = owner
        self._event = event
        self._buffers = buffers
        self._views = views

    def wait(self) -> list[npt.NDArray[Any]]:
        """The arrays, once they are there; to be asked once."""
        start = time.perf_counter()
        self._event.synchronize()
        self._owner.waited_seconds += time.perf_counter() - start
        arrays = [view.numpy().copy() for view in self._views]
        self._owner.free += self._buffers
        return arrays


def _as(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The beginning of the bytes ``memory`` as a tensor of the dtype and shape of ``like``."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
