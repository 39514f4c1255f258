"""``core.device.Device`` on a CPU and on an NVIDIA GPU."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mmserve.core.device import FIRST, LAST, STEPS, Device, Event, Graph, GraphCosts, Stream, Timer
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.recording import NotRecordable, Recording

log = logging.getLogger(__name__)

WARMUPS = 2  # forwards before a capture: lazy initialisation must not be recorded


def device_for(torch_device: torch.device, eager: bool = False) -> Device:
    """``eager``: nothing is captured, every forward runs as it is."""
    if torch_device.type == "cuda":
        return EagerCUDADevice(torch_device) if eager else CUDADevice(torch_device)
    return EagerCPUDevice() if eager else CPUDevice()


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


class ClockTimer:
    """Where work is done when its call returns, the host's clock tells how long it takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = self._stop = 0.0

    def start(self) -> None:
        self._start = self._clock()

    def stop(self) -> None:
        self._stop = self._clock()

    def seconds(self) -> float:
        return self._stop - self._start


class EagerGraph:
    """Not a recording: the forward itself, called again over the same buffers."""

    def __init__(self, forward: Callable[[], None]) -> None:
        self._forward = forward

    def replay(self) -> None:
        self._forward()


class CPUDevice:
    name = "cpu"
    synchronous = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._costs = GraphCosts()
        self._said: set[str] = set()  # why something was not recorded

    def stream(self, priority: int = LAST) -> Stream:
        return CPUStream()

    def current(self) -> Stream:
        return CPUStream()

    def event(self) -> Event:
        return CPUEvent()

    def timer(self, clock: Callable[[], float]) -> Timer:
        return ClockTimer(clock)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def capture(self, forward: Callable[[], None], family: str = STEPS) -> Graph:
        """A recording; the forward itself where none can be made."""
        start = time.perf_counter()
        try:
            graph = Recording(forward)
        except (NotRecordable, NativeUnavailable) as reason:
            if str(reason) not in self._said:
                self._said.add(str(reason))
                log.warning("steps are not recorded: %s", reason)
            forward()
            return EagerGraph(forward)
        self._costs.graphs += 1
        self._costs.seconds += time.perf_counter() - start
        return graph

    def graph_costs(self) -> GraphCosts:
        return self._costs

    def free_memory(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def total_memory(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak(self, work: Callable[[], None]) -> int:
        """Nobody counts a CPU's."""
        work()
        return 0

    def give_back(self) -> None:
        pass


class EagerCPUDevice(CPUDevice):
    def capture(self, forward: Callable[[], None], family: str = STEPS) -> Graph:
        forward()
        return EagerGraph(forward)


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


def crosses_end(registered: range, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` begins in ``registered`` memory and ends behind it."""
    first = tensor.data_ptr()
    return first in registered and first + tensor.nbytes > registered.stop


class CUDATimer:
    def __init__(self) -> None:
        self._ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._ends[0].record()

    def stop(self) -> None:
        self._ends[1].record()

    def seconds(self) -> float:
        return self._ends[0].elapsed_time(self._ends[1]) / 1e3


class CUDADevice:
    """Graphs of a family share one memory pool: capture the largest batch first."""

    synchronous = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.name = torch.cuda.get_device_name(torch_device)
        self._graph_memory: dict[str, Any] = {}
        self._capturing: dict[str, torch.cuda.Stream] = {}
        self._costs = GraphCosts()
        self._registered = range(0)  # addresses of host memory

    def stream(self, priority: int = LAST) -> CUDAStream:
        return CUDAStream(torch.cuda.Stream(self.torch_device, priority=priority))

    def current(self) -> CUDAStream:
        return CUDAStream(torch.cuda.current_stream(self.torch_device))

    def event(self) -> CUDAEvent:
        return CUDAEvent()

    def timer(self, clock: Callable[[], float]) -> CUDATimer:
        return CUDATimer()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Memory of which only a part is registered cannot be copied from as it is."""
        if source.device.type == "cpu" and crosses_end(self._registered, source):
            source = source.clone()
        target.copy_(source, non_blocking=True)

    def pin(self, address: int, nbytes: int) -> None:
        try:
            error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        except Exception as reason:  # a build of torch without it
            log.warning("pixels are copied from memory that is not pinned: %s", reason)
            return
        if error:
            log.warning("pixels are copied from memory that is not pinned: cudaHostRegister said %d", error)
            return
        self._registered = range(address, address + nbytes)
        log.info("%d MiB of shared memory for pixels are pinned", nbytes >> 20)

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(_raw(stream))

    def capture(self, forward: Callable[[], None], family: str = STEPS) -> Graph:
        """Kernels keep the priority of the stream on which they were captured, wherever they are replayed."""
        start, stream = time.perf_counter(), self._capture_stream(family)
        self._warm_up(forward, stream)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(self.torch_device)[0]
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do (pin memory, say) is no part of the capture and no fault of it
        with torch.cuda.graph(
            graph,
            pool=self._graph_memory.get(family),
            stream=stream,
            capture_error_mode="thread_local",
        ):
            forward()
        self._graph_memory.setdefault(family, graph.pool())
        self._costs.graphs += 1
        self._costs.seconds += time.perf_counter() - start
        self._costs.nbytes += before - torch.cuda.mem_get_info(self.torch_device)[0]
        graph.replay()
        return graph

    def graph_costs(self) -> GraphCosts:
        return self._costs

    def free_memory(self) -> int:
        """What the driver has left, and what torch keeps for itself and does not use."""
        held = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + held

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def peak(self, work: Callable[[], None]) -> int:
        """With what falls between the blocks that torch reserves."""
        self.give_back()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_reserved(self.torch_device) - before

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def _capture_stream(self, family: str) -> torch.cuda.Stream:
        if family not in self._capturing:
            priority = FIRST if family == STEPS else LAST
            self._capturing[family] = torch.cuda.Stream(self.torch_device, priority=priority)
        return self._capturing[family]

    def _warm_up(self, forward: Callable[[], None], stream: torch.cuda.Stream) -> None:
        here = torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                forward()
        here.wait_stream(stream)


class EagerCUDADevice(CUDADevice):
    def capture(self, forward: Callable[[], None], family: str = STEPS) -> Graph:
        forward()
        return EagerGraph(forward)
