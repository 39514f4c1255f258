"""The vision transformer alone: vision tokens a second, by the size of pictures and their number."""

import time
from statistics import median
from typing import Any

import torch

from mmserve.bench.flops import encoder_flops
from mmserve.bench.roofline import Rates, synchronize
from mmserve.models.config import VisionConfig
from mmserve.models.registry import LoadedModel


def grid_of(model: LoadedModel, size: tuple[int, int]) -> tuple[int, int]:
    """(h, w) in patches of a picture of (width, height) pixels, to the nearest that can be."""
    return grid_in(model.config.vision, size)


def grid_in(vision: VisionConfig, size: tuple[int, int]) -> tuple[int, int]:
    """The same of a configuration."""
    unit = vision.patch_size * vision.merge_size
    width, height = (max(1, round(side / unit)) * vision.merge_size for side in size)
    return height, width


def measure(
    model: LoadedModel, size: tuple[int, int], batch: int, rounds: int, rates: Rates
) -> dict[str, Any]:
    """One row, the median of ``rounds`` after one to warm up. The model's limit of pixels is not asked."""
    grid = grid_of(model, size)
    return _row(model, grid, batch, seconds(model, grid, batch, rounds), rates)


def seconds(model: LoadedModel, grid: tuple[int, int], batch: int, rounds: int) -> float:
    """Of ``batch`` pictures of ``grid``, pixels in the host's memory: the median of ``rounds``."""
    patch = model.config.vision.patch_size
    generator = torch.Generator().manual_seed(0)
    shape = (1, grid[0] * patch, grid[1] * patch, 3)
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(batch)]
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with torch.inference_mode():
            model.encoder.forward(pixels, [grid] * batch)
        synchronize(model.device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _row(model: LoadedModel, grid: tuple[int, int], batch: int, taken: float, rates: Rates) -> dict[str, Any]:
    vision = model.config.vision
    tokens = grid[0] * grid[1] // vision.merge_size**2
    speed = encoder_flops(model.config, [grid] * batch) / taken
    return {
        "picture": f"{grid[1] * vision.patch_size}x{grid[0] * vision.patch_size}",
        "batch": batch,
        "vision tokens": batch * tokens,
        "ms": 1e3 * taken,
        "tokens/s": batch * tokens / taken,
        "GFLOP/s": speed / 1e9,
        "of matrix rate": f"{100 * speed / rates.best:.0f} %",
    }
