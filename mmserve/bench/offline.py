"""The engine in this process, without workers and server: requests are made ready before the clock starts."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import Any

import torch

from mmserve.bench import flops
from mmserve.bench.media import still
from mmserve.bench.roofline import Rates
from mmserve.bench.workload import WORDS
from mmserve.core.config import Config
from mmserve.core.messages import (
    ChatInput,
    ImagePart,
    Message,
    PreparedRequest,
    SamplingParams,
    TokenOutput,
)
from mmserve.engine.engine import Engine
from mmserve.models.hub import resolve
from mmserve.models.registry import LoadedModel, load_model
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec


@dataclass(frozen=True)
class Shape:
    """Of a request: ``text`` tokens, pictures of (width, height) pixels, tokens of the answer."""

    text: int = 32
    pictures: int = 1
    size: tuple[int, int] = (512, 512)
    answer: int = 64


class Bench:
    """A loaded model and its processor."""

    def __init__(self, config: Config) -> None:
        if config.runner.threads:
            torch.set_num_threads(config.runner.threads)
        weights = config.model.load_format != "dummy"
        folder = resolve(config.model.model, config.model.revision, weights=weights)
        self.config = config
        self.spec = ProcessorSpec.load(folder)
        self.processor = Processor(self.spec, config.media)
        self.model: LoadedModel = load_model(config.model, linear_backend=config.runner.linear_backend)

    def engine(self) -> Engine:
        return Engine(self.model, self.config, self.spec.eos_ids)

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights."""
        size = flops.bytes_of_weight(self.model.dtype.itemsize, self.config.model.quantization)
        return flops.weight_bytes(self.model.config, size)

    @cached_property
    def tokens(self) -> list[int]:
        """Plain tokens to make prompts of."""
        return sorted(set(self.processor.tokenize(" ".join(WORDS))))

    def request(self, shape: Shape, seed: int) -> PreparedRequest:
        """A prompt of random tokens behind pictures made from ``seed``; its answer has its full length."""
        marks = self.spec.tokens
        words = random.Random(seed).choices(self.tokens, k=shape.text)
        pictures = (marks.vision_start, marks.image, marks.vision_end) * shape.pictures
        width, height = shape.size
        files = [still(height, width, "JPEG", seed * 101 + n).data for n in range(shape.pictures)]
        chat = ChatInput(
            request_id=str(seed),
            messages=(Message("user", tuple(ImagePart(data=data) for data in files)),),
            prompt=(*pictures, *words),
            sampling=SamplingParams(temperature=0.0, max_tokens=shape.answer, ignore_eos=True),
        )
        return self.processor.prepare(chat).request


@dataclass(frozen=True)
class Lap:
    """One batch from its submission to its last token. Times are seconds."""

    first: Sequence[float]  # to each request's first token
    generated: int  # tokens by the moment at which all had their first
    decodes: Sequence[float]  # of each step after that, when all decode and nothing else is done


def lap(engine: Engine, requests: Sequence[PreparedRequest]) -> Lap:
    """Run ``requests``, which arrive together; RuntimeError if one of them fails."""
    for request in requests:
        engine.submit(request)
    start = before = time.perf_counter()
    first: dict[str, float] = {}
    generated, decodes = 0, []
    while engine.has_work:
        outputs = [o for o in engine.step() if isinstance(o, TokenOutput)]
        now = time.perf_counter()
        failed = [o.error for o in outputs if o.finish_reason not in (None, "length")]
        if failed:
            raise RuntimeError(f"a request failed: {failed[0]}")
        if len(first) == len(requests):
            decodes.append(now - before)
        else:
            generated += sum(len(o.token_ids) for o in outputs)
            first |= {o.request_id: now - start for o in outputs if o.request_id not in first}
        before = now
    return Lap(list(first.values()), generated, decodes)


def latency(
    bench: Bench, engine: Engine, shape: Shape, batch: int, rounds: int, rates: Rates
) -> dict[str, Any]:
    """One row: medians over ``rounds`` of TTFT and of the time of a token, and what share of the machine
    they use. Every round has new prompts and pictures, so that nothing is cached."""
    laps, sample = [], None
    for number in range(rounds + 1):  # the first is to warm up
        seed = (number * 1009 + batch) * 1013 + shape.text + shape.pictures
        requests = [bench.request(shape, seed * 1024 + k) for k in range(batch)]
        sample = requests[0]
        laps.append(lap(engine, requests))
    assert sample is not None
    return {"batch": batch, "prompt": sample.num_tokens, **_times(laps[1:])} | _shares(
        bench, sample, batch, laps[1:], rates
    )


def _times(laps: Sequence[Lap]) -> dict[str, Any]:
    steps = [step for lap in laps for step in lap.decodes]
    return {
        "TTFT mean ms": 1e3 * median(mean(lap.first) for lap in laps),
        "TTFT max ms": 1e3 * median(max(lap.first) for lap in laps),
        "ms/token": 1e3 * median(steps) if steps else None,
    }


def _shares(
    bench: Bench, sample: PreparedRequest, batch: int, laps: Sequence[Lap], rates: Rates
) -> dict[str, Any]:
    """Of the prompts: FLOPs a second until all have their first token, the tokens that some had more by then
    included. Of decoding: bytes of weights, and of keys and values, a second."""
    config, itemsize = bench.model.config, bench.model.dtype.itemsize
    prompt = sample.num_tokens
    encoder = flops.encoder_flops(config, (item.grid for item in sample.items))
    work = batch * (encoder + flops.prefill_flops(config, prompt))
    speeds = [
        (work + flops.decode_flops(config, prompt) * (lap.generated - batch)) / max(lap.first) for lap in laps
    ]
    steps = [step for lap in laps for step in lap.decodes]
    weights = bench.weight_bytes
    context = batch * flops.kv_bytes(config, itemsize) * (prompt + len(laps[0].decodes) // 2)
    row: dict[str, Any] = {
        "prompt GFLOP/s": median(speeds) / 1e9,
        "of matrix rate": _percent(median(speeds) / rates.best),
    }
    step = median(steps) if steps else None
    row["weights GB/s"] = weights / step / 1e9 if step else None
    row["of read rate"] = _percent(weights / step / rates.read) if step else None
    row["with KV"] = _percent((weights + context) / step / rates.read) if step else None
    return row


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
