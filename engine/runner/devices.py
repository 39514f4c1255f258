"""``core.device.Device`` on a CPU and on an NVIDIA GPU."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mmserve.core.device import Device, Event, Graph, Stream
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.recording import NotRecordable, Recording

log = logging.getLogger(__name__)

WARMUPS = 2  # forwards before a capture: lazy initialisation must not be recorded


def device_for(torch_device: torch.device) -> Device:
    return CUDADevice(torch_device) if torch_device.type == "cuda" else CPUDevice()


# ---------------------------------------------------------------- CPU: everything happens at once


class CPUStream:
    def use(self) -> AbstractContextManager[None]:
        return nullcontext()


class CPUEvent:
    def record(self, stream: Stream) -> None:
        pass

    def wait(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def done(self) -> bool:
        return True


class EagerGraph:
    """Not a recording: the forward itself, called again over the same buffers."""

    def __init__(self, forward: Callable[[], None]) -> None:
        self._forward = forward

    def replay(self) -> None:
        self._forward()


class CPUDevice:
    name = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def stream(self, priority: int = 0) -> Stream:
        return CPUStream()

    def event(self) -> Event:
        return CPUEvent()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, forward: Callable[[], None]) -> Graph:
        """A recording; the forward itself where none can be made."""
        try:
            return Recording(forward)
        except (NotRecordable, NativeUnavailable) as reason:
            log.warning("steps of decodes are not recorded: %s", reason)
            return EagerGraph(forward)

    def free_memory(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- CUDA


class CUDAStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw = stream

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.raw)


class CUDAEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self, stream: Stream) -> None:
        self._event.record(_raw(stream))

    def wait(self, stream: Stream) -> None:
        _raw(stream).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return self._event.query()


def _raw(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, CUDAStream), "a stream of another device"
    return stream.raw


class CUDADevice:
    """Graphs share one memory pool: capture the largest batch first, and replay one at a time."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.name = torch.cuda.get_device_name(torch_device)
        self._graph_memory: Any = None

    def stream(self, priority: int = 0) -> CUDAStream:
        return CUDAStream(torch.cuda.Stream(self.torch_device, priority=priority))

    def event(self) -> CUDAEvent:
        return CUDAEvent()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, forward: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._warm_up(forward)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            forward()
        self._graph_memory = self._graph_memory or graph.pool()
        return graph

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def _warm_up(self, forward: Callable[[], None]) -> None:
        side = torch.cuda.Stream(self.torch_device)
        side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                forward()
        torch.cuda.current_stream(self.torch_device).wait_stream(side)
