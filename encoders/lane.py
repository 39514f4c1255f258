"""The encoder's own stream: what is launched there runs beside the steps of answers, and after them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from mmserve.core.device import LAST, Device, Event, Timer

Host = TypeVar("Host", torch.Tensor, torch.Tensor | None)


class Lane:
    """What is launched, and what of it has happened.

        steps (first)     |=== n ===|=== n + 1 ===|=== n + 2 ===|
        pictures (last)   |- copies -|== slice ==|        | next slice ...
                                                 event: the features are there, pixels are read no more

    Who waits for whom: nobody in the device, for features are shown to the steps only when the host has seen
    the event. What may be reused when: pixels on the host are held until an event behind their copies, also
    when their batch is dropped; memory of features, which steps read, is given away only behind what the
    steps' stream had to do when they were freed (``share``).
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream(LAST)
        self._event = device.event()  # ends what was launched last
        self._copied: list[tuple[Event, Sequence[torch.Tensor | None]]] = []
        self._slice: tuple[float, Timer] | None = None

    @property
    def busy(self) -> bool:
        return not self._event.done()

    def upload(self, tensors: Sequence[Host]) -> list[Host]:
        """On the device, in order; read where they are, and without waiting where that is pinned memory."""
        with self.stream.use():
            placed = [None if t is None else self._uploaded(t) for t in tensors]
        event = self.device.event()
        event.record(self.stream)
        self._copied.append((event, tensors))
        return placed

    def launch(self, part: Callable[[], float]) -> float:
        """``part`` launches a slice and tells its operations."""
        timer = self.device.timer(lambda: 0.0)
        with self.stream.use():
            timer.start()
            work = part()
            timer.stop()
        self._event.record(self.stream)
        self._slice = work, timer
        return work

    def collect(self) -> list[tuple[float, float]]:
        """Operations and seconds of the slice launched last, if all has ended since this was last asked."""
        self._copied = [(event, held) for event, held in self._copied if not event.done()]
        if self._slice is None or self.busy:
            return []
        (work, timer), self._slice = self._slice, None
        return [(work, timer.seconds())]

    def share(self, tensor: torch.Tensor) -> None:
        """The current stream may read ``tensor``, which was made here."""
        self.device.keep_for(tensor, self.device.current())

    def wait(self) -> None:
        self._event.synchronize()

    def _uploaded(self, tensor: torch.Tensor) -> torch.Tensor:
        placed = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device.torch_device)
        self.device.copy(placed, tensor)
        return placed
