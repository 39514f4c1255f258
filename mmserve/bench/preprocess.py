"""How many pictures and frames a second preprocessing makes ready, beside transformers' own loop.

Every contender turns the same encoded files into what its encoder wants: transformers' Pillow image
processor into float patches, ours into uint8 pixels and a digest. One round measures all of them in
turn, so that they meet the same noise; figures are medians over the rounds.
"""

import asyncio
import io
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from mmserve.bench.media import Sample, clip, still
from mmserve.core.config import Config, MediaOptions
from mmserve.core.messages import ImagePart, VideoPart
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import PixelBudget, ProcessorSpec
from mmserve.preprocess.workers import Workers, make_workers

SECONDS = 1.0  # about how long one contender works on one sample in one round
FPS = 2.0
PEER, HERE = "transformers", "this thread"

Contender = Callable[[Sample, int], Coroutine[Any, Any, None]]


def samples() -> list[Sample]:
    """Stills by size and format, and clips."""
    return [
        still(480, 640, "JPEG"),
        still(1080, 1920, "JPEG"),
        still(3000, 4000, "JPEG"),
        still(1080, 1920, "PNG"),
        still(1080, 1920, "WEBP"),
        clip(720, 1280, 10),
        clip(720, 1280, 60),
    ]


def budgeted(spec: ProcessorSpec, max_pixels: int) -> ProcessorSpec:
    """The model's processor, with pictures of at most ``max_pixels`` after the resize."""
    return replace(spec, image=PixelBudget(min(spec.image.min_pixels, max_pixels), max_pixels))


async def measure(
    spec: ProcessorSpec, counts: Sequence[int], rounds: int, chosen: Sequence[Sample]
) -> list[dict[str, Any]]:
    """One row a sample: items a second of every contender, and their ratios."""
    pools = {n: make_workers(spec, Config.of(workers=n)) for n in counts}
    try:
        for pool in pools.values():
            pool.wait_ready()
        contenders = {PEER: _transformers(spec), HERE: _one_thread(spec)}
        contenders |= {f"{n} worker{'s' * (n > 1)}": _pool(pool, n) for n, pool in pools.items()}
        return [await _row(sample, contenders, rounds) for sample in chosen]
    finally:
        for pool in pools.values():
            await pool.close()


async def _row(sample: Sample, contenders: dict[str, Contender | None], rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    able = {n: c for n, c in contenders.items() if c is not None and not (sample.frames > 1 and n == PEER)}
    count = await _calibrated(able[HERE], sample)
    for _ in range(rounds):
        for name, contender in able.items():
            start = time.perf_counter()
            await contender(sample, count)
            speeds[name].append(count * sample.frames / (time.perf_counter() - start))
    return {"sample": sample.name} | {n: median(s) if s else None for n, s in speeds.items()}


async def _calibrated(contender: Contender, sample: Sample) -> int:
    """How many items take about SECONDS; also warms up."""
    await contender(sample, 1)
    start = time.perf_counter()
    await contender(sample, 1)
    return max(2, round(SECONDS / (time.perf_counter() - start)))


def part_of(sample: Sample) -> ImagePart | VideoPart:
    return VideoPart(data=sample.data, fps=FPS) if sample.frames > 1 else ImagePart(data=sample.data)


def _one_thread(spec: ProcessorSpec) -> Contender:
    processor = Processor(spec, MediaOptions())

    async def run(sample: Sample, count: int) -> None:
        for _ in range(count):
            processor.see(part_of(sample))

    return run


def _pool(pool: Workers, workers: int) -> Contender:
    """As many items under way as keep the workers busy."""

    async def run(sample: Sample, count: int) -> None:
        gate = asyncio.Semaphore(2 * workers)

        async def one() -> None:
            async with gate:
                await pool.see(part_of(sample))

        await asyncio.gather(*(one() for _ in range(count)))

    return run


def _transformers(spec: ProcessorSpec) -> Contender | None:
    """The Pillow form of transformers' image processor, on pictures opened as its users open them."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    except ImportError:
        return None
    from PIL import Image

    budget = {"shortest_edge": spec.image.min_pixels, "longest_edge": spec.image.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=spec.patch, merge_size=spec.merge, size=budget)

    async def run(sample: Sample, count: int) -> None:
        for _ in range(count):
            processor(images=[Image.open(io.BytesIO(sample.data)).convert("RGB")])

    return run


def with_ratios(row: dict[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    """The row and what the aim is stated in: one worker over the peer, each pool over one worker."""
    names = [f"{n} worker{'s' * (n > 1)}" for n in counts]
    ratios = {f"{names[0]} / {PEER}": _ratio(row[names[0]], row[PEER])}
    ratios |= {f"{name} / {names[0]}": _ratio(row[name], row[names[0]]) for name in names[1:]}
    return row | ratios


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None
