"""How fast this machine reads memory and multiplies matrices: what a model's own rates are held against.

The roofline model: S. Williams, A. Waterman, D. Patterson, Communications of the ACM 52(4), 2009.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mmserve.core.config import options
from mmserve.core.errors import ConfigError
from mmserve.models.ops.registry import LinearOp, choose_ops

READ_BYTES = 256 << 20  # beyond any cache
ROWS, WIDTH = 512, 2048  # of the products: as a step of a prompt has them
LEAST_RUNS, LEAST_S = 7, 0.3  # of each measurement


@dataclass(frozen=True)
class Rates:
    """``read``: bytes a second. ``matrix``: FLOPs a second in the dtype that runs, by linear form, and
    ``float32`` in that. ``quantized``: the same of the quantisation that runs, if one does, with activations
    in ``dtype``. The best of some runs each."""

    dtype: torch.dtype
    read: float
    matrix: dict[str, float]
    float32: dict[str, float]
    quantized: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """FLOPs a second of the fastest form of the arithmetic that runs."""
        return max((self.quantized or self.matrix).values())

    def told(self) -> str:
        """One line for people."""
        return (
            f"this machine reads {self.read / 1e9:.1f} GB/s and multiplies, in GFLOP/s:"
            f" {_name(self.dtype)} {_forms(self.matrix | self.quantized)}; float32 {_forms(self.float32)}"
        )

    def report(self) -> dict[str, Any]:
        """For JSON, in GB/s and GFLOP/s."""
        forms = {"float32": self.float32, _name(self.dtype): self.matrix | self.quantized}
        rates = {dtype: {form: rate / 1e9 for form, rate in found.items()} for dtype, found in forms.items()}
        return {"read GB/s": self.read / 1e9, "GFLOP/s": rates}


def measure(device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Rates:
    """Takes a second or two. ConfigError for a ``quantization`` that cannot run."""
    with torch.inference_mode():
        float32 = _matrix_rates(device, torch.float32)
        matrix = float32 if dtype == torch.float32 else _matrix_rates(device, dtype)
        quantized = {} if quantization == "none" else _quantized_rate(device, dtype, quantization)
        return Rates(dtype, _read_rate(device), matrix, float32, quantized)


def _read_rate(device: torch.device) -> float:
    """The better of a sum and of a product with a vector, which is how decoding reads weights."""
    memory = torch.ones(READ_BYTES // 4 // WIDTH, WIDTH, device=device)
    vector = torch.ones(WIDTH, device=device)
    seconds = min(_best(memory.sum, device), _best(partial(torch.mv, memory, vector), device))
    return READ_BYTES / seconds


def _matrix_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """By name, of each linear form that can run."""
    rates = {}
    for name in linear_forms():
        try:
            linear = choose_ops(device, dtype, name).linear
        except ConfigError:
            continue  # it cannot run here; `mmserve doctor` tells why
        rates[linear.name] = _matrix_rate(device, dtype, linear)
    return rates


def _quantized_rate(device: torch.device, dtype: torch.dtype, quantization: str) -> dict[str, float]:
    linear = choose_ops(device, dtype, "plain", quantization).quantized
    return {} if linear is None else {linear.name: _matrix_rate(device, dtype, linear)}


def _matrix_rate(device: torch.device, dtype: torch.dtype, linear: LinearOp) -> float:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, WIDTH, generator=generator).to(device, dtype) for n in (ROWS, WIDTH))
    packed = linear.pack(weight)
    return 2 * ROWS * WIDTH**2 / _best(partial(linear, x, packed, None), device)


def linear_forms() -> tuple[str, ...]:
    """The names that ``linear_backend`` may have, but for the one that means a choice among them."""
    [choices] = [f.metadata["choices"] for _, f in options() if f.name == "linear_backend"]
    return tuple(name for name in choices if name != "auto")


def _best(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of some runs, after one to warm up."""
    times: list[float] = []
    while len(times) <= LEAST_RUNS or sum(times) < LEAST_S:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def synchronize(device: torch.device) -> None:
    """Wait until all work given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _forms(rates: dict[str, float]) -> str:
    return ", ".join(f"{form} {rate / 1e9:.0f}" for form, rate in rates.items())
