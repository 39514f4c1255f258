"""What a device can do at most, and how closely the kernels of a step follow one another."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mmserve.bench.roofline import synchronize
from mmserve.core.device import Device
from mmserve.engine.runner.devices import device_for


@dataclass(frozen=True)
class Rates:
    """``read``: bytes a second that kernels move, reads and writes together. ``matrix``: FLOPs a second of
    bf16 products of random numbers."""

    read: float
    matrix: float

    def report(self) -> dict[str, float]:
        return {"GB/s": self.read / 1e9, "TFLOP/s": self.matrix / 1e12}


def measure(device: torch.device, small: bool = False) -> Rates:
    """The best of some runs each; ``small`` for a trial on a machine that has no time to lose."""
    place, nbytes, width = device_for(device), 1 << 22 if small else 4 << 30, 256 if small else 8192
    with torch.inference_mode():
        source = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        copied = 2 * nbytes / best(partial(target.copy_, source), place)
        matrix = source[: nbytes // 2 // width * width].view(-1, width)
        vector = torch.ones(width, dtype=torch.bfloat16, device=device)
        read = nbytes / best(partial(torch.mv, matrix, vector), place)
        del source, target, matrix
        a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
        return Rates(max(copied, read), 2 * width**3 / best(partial(torch.mm, a, b), place))


def best(work: Callable[[], Any], device: Device, runs: int = 10) -> float:
    """Seconds of the fastest of ``runs`` of ``work`` on the device, after one to warm up."""
    times = []
    for _ in range(runs + 1):
        timer = device.timer(time.perf_counter)
        timer.start()
        work()
        timer.stop()
        synchronize(device.torch_device)
        times.append(timer.seconds())
    return min(times[1:])


@dataclass(frozen=True)
class Replay:
    """One step's work on the device: its seconds, and the share of them in which no kernel runs."""

    seconds: float
    gaps: float


def replay(work: Callable[[], Any], device: torch.device, runs: int = 20) -> Replay:
    """``work`` launches the same kernels each time; on CUDA only."""
    with torch.inference_mode():
        work()
        whole = best(lambda: [work() for _ in range(runs)], device_for(device), 3) / runs
        with _profiled() as profile:
            for _ in range(runs):
                work()
            torch.cuda.synchronize(device)
    return Replay(whole, max(0.0, 1 - covered(_kernels(profile())) / runs / whole))


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of ``intervals``: kernels may run beside each other."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


@contextmanager
def _profiled() -> Iterator[Callable[[], Any]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        yield lambda: found.events()


def _kernels(events: Any) -> list[tuple[float, float]]:
    """(start, stop) of what ran on the device, in seconds."""
    from torch.autograd import DeviceType

    ran = [event.time_range for event in events if event.device_type == DeviceType.CUDA]
    return [(span.start / 1e6, span.end / 1e6) for span in ran]
