"""The whole offline path with all requests there at once: decoding, encoding, prefill, answers."""

import asyncio
import io
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from mmserve.bench import flops
from mmserve.bench.media import still
from mmserve.bench.offline import Shape
from mmserve.bench.roofline import Rates
from mmserve.bench.workload import WORDS
from mmserve.core.messages import ImagePart, SamplingParams, Seen
from mmserve.llm import LLM, Completion
from mmserve.models.config import ModelConfig


def conversation(shape: Shape, seed: int) -> list[dict[str, Any]]:
    """One message: pictures made from ``seed``, then about ``shape.text`` tokens of common words."""
    width, height = shape.size
    pictures = [still(height, width, "JPEG", seed * 101 + number).data for number in range(shape.pictures)]
    words = " ".join(random.Random(seed).choices(WORDS, k=shape.text))
    parts: list[dict[str, Any]] = [{"type": "image", "image": data} for data in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def measure(
    llm: LLM, config: ModelConfig, dtype: torch.dtype, shape: Shape, requests: int, rounds: int, rates: Rates
) -> dict[str, Any]:
    """One row: medians over ``rounds``, each of which has new prompts and pictures, after one to warm up."""
    rows = []
    for number in range(rounds + 1):
        count = requests if number else min(requests, 2)
        chats = [conversation(shape, number * 100_003 + k) for k in range(count)]
        rows.append(_lap(llm, config, dtype, shape, chats, rates))
    return {name: median(row[name] for row in rows[1:]) for name in rows[1]}


def _lap(
    llm: LLM, config: ModelConfig, dtype: torch.dtype, shape: Shape, chats: Sequence[Any], rates: Rates
) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=shape.answer, ignore_eos=True)
    steps, start = llm.service.stats()["steps"], time.perf_counter()
    answers = llm.chat(chats, sampling)
    wall = time.perf_counter() - start
    steps = llm.service.stats()["steps"] - steps
    prompts = [a.usage.prompt_tokens for a in answers]
    words = [a.usage.completion_tokens for a in answers]
    speed = _flops(llm, config, shape, answers) / wall
    size = flops.bytes_of_weight(dtype.itemsize, llm.config.model.quantization)
    read = steps * flops.weight_bytes(config, size) / wall
    return {
        "requests": len(chats),
        "prompt tokens": sum(prompts) / len(prompts),
        "wall s": wall,
        "requests/s": len(chats) / wall,
        "output tok/s": sum(words) / wall,
        "all tok/s": (sum(prompts) + sum(words)) / wall,
        "steps": steps,
        "GFLOP/s": speed / 1e9,
        "% of matrix rate": 100 * speed / rates.best,
        "% of read rate": 100 * read / rates.read,
    }


def _flops(llm: LLM, config: ModelConfig, shape: Shape, answers: Sequence[Completion]) -> int:
    """All that was computed: what was cached was not."""
    total = 0
    if shape.pictures:
        grid = _seen(llm, shape).grid
        total += len(answers) * shape.pictures * flops.encoder_flops(config, [grid])
    for usage in (answer.usage for answer in answers):
        total += flops.prefill_flops(config, usage.prompt_tokens, usage.cached_tokens)
        total += flops.decode_flops(config, usage.prompt_tokens, usage.completion_tokens - 1)
    return total


def _seen(llm: LLM, shape: Shape) -> Seen:
    """What the model sees of a picture of this size."""
    import numpy as np
    from PIL import Image

    width, height = shape.size
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "PNG")
    return asyncio.run(llm.service.look(ImagePart(data=file.getvalue())))
