"""Hardware and models on paper: what a step would take if every data sheet were true.

The figures are those of data sheets and of the models' own configuration files, none is a measurement. Real
machines attain a share of them, and what comes out of a simulation is a bound and a shape, no forecast.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mmserve.core.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """``bandwidth`` bytes/s, ``flops`` dense 16-bit operations/s, ``memory`` bytes; ``host_s`` fixed seconds
    a step beside the arithmetic (assumed, not from any sheet); ``source`` of the others."""

    bandwidth: float
    flops: float
    memory: float
    host_s: float
    source: str


@dataclass(frozen=True)
class Shape:
    """``weights`` of the language model and ``vision`` of its vision transformer, in parameters of two bytes;
    its attention; ``patches`` of a picture behind one vision token."""

    weights: float
    vision: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    patches: int = 4

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


HARDWARE = {
    "cpu2": Hardware(
        25.6e9,
        0.36e12,
        24e9,
        2e-3,
        "two cores of a Xeon of the Ice Lake generation at 2.8 GHz: two AVX-512 units each, 64 float32"
        " operations a cycle (Intel's optimisation manual); one channel of DDR4-3200, 25.6 GB/s (JEDEC)",
    ),
    "orin-nano": Hardware(
        68e9,
        10e12,
        8e9,
        1e-3,
        "NVIDIA's data sheet of Jetson Orin Nano 8GB: 68 GB/s, 40 TOPS of sparse int8, a quarter of it in"
        " dense 16 bits",
    ),
    "l4": Hardware(
        300e9,
        121e12,
        24e9,
        5e-4,
        "NVIDIA's data sheet of L4: 300 GB/s, 242 TFLOPS of sparse bf16, half dense",
    ),
    "h100": Hardware(
        3.35e12,
        989e12,
        80e9,
        3e-4,
        "NVIDIA's data sheet of H100 SXM: 3.35 TB/s, 1,979 TFLOPS of sparse bf16, half dense",
    ),
}

SHAPES = {
    "qwen2.5-vl-3b": Shape(3.1e9, 0.67e9, layers=36, heads=16, kv_heads=2, head_dim=128),
    "qwen2.5-vl-7b": Shape(7.6e9, 0.68e9, layers=28, heads=28, kv_heads=4, head_dim=128),
}


class Costs:
    """Seconds of the work of one step on ``hardware`` of which the share ``attained`` is reached."""

    def __init__(self, hardware: Hardware, shape: Shape, attained: float = 1.0) -> None:
        self.hardware, self.shape = hardware, shape
        self._bandwidth, self._flops = hardware.bandwidth * attained, hardware.flops * attained

    def step(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Of tokens [start, stop) of each request: the weights are read once or multiplied, whichever takes
        longer, then every request's keys and values are read."""
        shape, tokens, context, scores = self.shape, 0, 0, 0
        for start, stop in chunks:
            tokens += stop - start
            context += stop
            scores += (stop - start) * (start + stop) // 2
        work = 2 * shape.weights * tokens + 4 * shape.layers * shape.heads * shape.head_dim * scores
        weights = max(2 * shape.weights / self._bandwidth, work / self._flops)
        return self.hardware.host_s + weights + context * shape.kv_bytes / self._bandwidth

    def encode(self, tokens: int) -> float:
        """Of so many vision tokens in one batch; the attention within pictures is left out."""
        work = 2 * self.shape.vision * self.shape.patches * tokens
        return max(2 * self.shape.vision / self._bandwidth, work / self._flops)

    def pages(self, page_size: int, most: int = 1 << 18) -> int:
        """Pages in nine tenths of the memory that the weights leave, and no more than a simulation can hold.
        ConfigError when there is no room for any."""
        room = 0.9 * (self.hardware.memory - 2 * (self.shape.weights + self.shape.vision))
        pages = min(int(room / (self.shape.kv_bytes * page_size)), most)
        if pages < 2:
            raise ConfigError(
                "the weights leave no room for keys and values; take a smaller shape", param="shape"
            )
        return pages
