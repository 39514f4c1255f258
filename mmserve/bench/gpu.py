"""What a device does with models of published shapes, beside what it can do at most: ``mmserve bench gpu``.

Figures are the engine's own: requests are made ready beforehand, steps run as they do in service. Shares are
of rates that are measured first, on the same device (``gpu_rates.py``); work is counted (``flops.py``).
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmserve.bench import encoder, flops, gpu_rates, offline, stalls
from mmserve.bench.figures import Figure, Goal, Ledger
from mmserve.bench.gpu_rates import Rates
from mmserve.bench.offline import Bench, Shape
from mmserve.bench.peers import BATCHING, GENERATE, Transformers
from mmserve.bench.shapes import TINY, write_shape
from mmserve.core.config import Config
from mmserve.core.messages import PreparedRequest
from mmserve.models.config import read_config

DECODE_GOALS = {1: Goal(least=0.8), 64: Goal(least=0.7)}  # shares of the memory's rate
PREFILL_GOAL, ENCODER_GOAL = Goal(least=0.6), Goal(least=0.5)  # shares of the matrix rate
GAPS_GOAL = Goal(most=0.03)  # of a replayed step
HIDDEN_GOAL = Goal(most=1.05)  # a step in service, in times of its work on the device
STALL_GOAL = Goal(most=1.2)
STEADY = 64  # rows of the step that is looked at closely, or the most that there are
TEXT = 32  # tokens of a question about a picture
MOST_STEPS = 2000  # until all prompts are computed
STREAMS = 8  # answers that are being written while pictures arrive
LOADED = 4096  # tokens that each of them has room for; what they could have at most, none will come to


@dataclass(frozen=True)
class Plan:
    """Sizes of what is measured. ``context``: tokens before the first decode; ``answer``: steps of decodes;
    ``prompt``: tokens of a prefill; ``picture``: (width, height); ``seconds``: of each stretch of a load."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 512
    answer: int = 64
    prompt: int = 8192
    picture: tuple[int, int] = (1024, 1024)
    pictures: int = 4
    rounds: int = 3
    seconds: float = 3.0
    peer_batches: tuple[int, ...] = (1, 8, 64)
    peer_answer: int = 24

    @property
    def steady(self) -> int:
        return max(batch for batch in self.batches if batch <= STEADY)

    @property
    def longest(self) -> int:
        """Tokens of a request: what is measured, or an answer that goes on while pictures arrive."""
        return max(self.context + self.answer, self.prompt, self.stream) + 64

    @property
    def stream(self) -> int:
        """Tokens of an answer that outlasts the load: no step takes less than half a millisecond."""
        return int(2 * stalls.ROUNDS * self.seconds * 2000) + 64


# Everything once, and small: what comes out is no figure.
TRIAL = Plan((1, 2), 16, 4, 48, (64, 64), 2, 1, 0.1, (1, 2), 2)


class Subject:
    """One model of the shape ``name``, with random weights, and an engine for it."""

    def __init__(self, name: str, folder: Path, plan: Plan, options: Mapping[str, Any]) -> None:
        """``options`` of the configuration tree go before our own."""
        self.name, self.plan = name, plan
        self.folder = write_shape(name, folder)
        self.bench = Bench(Config.of(**{**self._options(), **options}))
        self.engine = self.bench.engine()
        self.steps: dict[int, float] = {}  # seconds of a step of so many decodes
        self._seeds = count()

    def _options(self) -> dict[str, Any]:
        plan, most = self.plan, max(self.plan.batches)
        tokens = most * (plan.context + plan.answer + 64) + STREAMS * LOADED + 2 * plan.longest
        config = read_config(self.folder)
        options = {
            "model": str(self.folder),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_running": most + STREAMS,
            "step_tokens": max(plan.prompt, most),
            "kv_cache_mib": -(-tokens * flops.kv_bytes(config, 2) // 2**20) + 1,
        }
        return options if self.name == TINY else options | {"max_model_len": plan.longest}

    @property
    def device(self) -> torch.device:
        return self.bench.model.device

    @property
    def backends(self) -> dict[str, str]:
        return {**self.bench.model.backends, "attention": type(self.engine.runner.attention).__name__}

    def texts(self, number: int, tokens: int, answer: int) -> list[PreparedRequest]:
        shape = Shape(text=tokens, pictures=0, answer=answer)
        return [self.bench.request(shape, next(self._seeds)) for _ in range(number)]

    def picture(self, answer: int) -> PreparedRequest:
        shape = Shape(text=TEXT, pictures=1, size=self.plan.picture, answer=answer)
        return self.bench.request(shape, next(self._seeds))

    def run(self, requests: Sequence[PreparedRequest]) -> offline.Lap:
        return offline.lap(self.engine, requests)


# ---------------------------------------------------------------- names, by which peers find our figures


def decode_name(batch: int) -> str:
    return f"decode, batch {batch}"


def prefill_name(plan: Plan) -> str:
    return f"prefill, {plan.prompt} tokens"


def encoder_name(plan: Plan) -> str:
    return f"encoder, {plan.pictures} pictures of {plan.picture[0]}x{plan.picture[1]}"


def first_name(plan: Plan) -> str:
    return f"first token, a picture of {plan.picture[0]}x{plan.picture[1]}"


# ---------------------------------------------------------------- our engine


def measure_shape(
    name: str,
    folder: Path,
    plan: Plan,
    options: Mapping[str, Any],
    rates: Rates,
    ledger: Ledger,
    backends: dict[str, dict[str, str]],
) -> None:
    """Load and measure one model, whose ``folder`` is left; ``backends`` are told which forms run."""
    made: list[Subject] = []

    def load() -> list[Figure]:
        start = time.perf_counter()
        made.append(Subject(name, folder, plan, options))
        backends[name] = made[0].backends
        return [Figure(name, "load and prepare", time.perf_counter() - start, "s")]

    ledger.measure(name, "load and prepare", "s", load)
    for subject in made:
        measure(subject, rates, ledger)


def measure(subject: Subject, rates: Rates, ledger: Ledger) -> None:
    """Everything about our own engine, the most wanted first."""
    plan, name = subject.plan, subject.name

    def decode(batch: int) -> None:
        ledger.measure(name, decode_name(batch), "tok/s", lambda: _decode(subject, rates, batch))

    decode(1)
    decode(plan.steady)
    ledger.measure(name, "launch gaps", "%", lambda: _step(subject))
    ledger.measure(name, "host time", "ms", lambda: _host(subject))
    ledger.measure(name, prefill_name(plan), "tok/s", lambda: _prefill(subject, rates))
    ledger.measure(name, encoder_name(plan), "tok/s", lambda: _encoder(subject, rates))
    ledger.measure(name, first_name(plan), "ms", lambda: _first_token(subject))
    ledger.measure(name, "ITL p99 under image load", "x", lambda: _stalls(subject))
    for batch in plan.batches:
        if batch not in (1, plan.steady):
            decode(batch)
    ledger.measure(name, "graphs", "s", lambda: _captures(subject))


def _decode(subject: Subject, rates: Rates, batch: int) -> list[Figure]:
    """Steps in which all decode; what they read is all weights, and the keys and values of all contexts."""
    plan, bench = subject.plan, subject.bench
    done = subject.run(subject.texts(batch, plan.context, plan.answer))
    step = median(done.decodes)
    subject.steps[batch] = step
    context = batch * (plan.context + plan.answer // 2)
    nbytes = bench.weight_bytes + context * flops.kv_bytes(bench.model.config, bench.model.dtype.itemsize)
    share, goal = nbytes / step / rates.read, DECODE_GOALS.get(batch)
    return [Figure(subject.name, decode_name(batch), batch / step, "tok/s", share, goal)]


def _step(subject: Subject) -> list[Figure]:
    """Of the largest step of decodes up to STEADY: what it takes on the device alone, for how much of that no
    kernel runs, and what it takes in service."""
    rows, name = subject.plan.steady, subject.name
    if subject.device.type != "cuda":
        raise RuntimeError("a step is looked at on a GPU alone")
    replay = gpu_rates.replay(lambda: subject.engine.runner.graphs.again(rows), subject.device)
    return [
        Figure(name, "launch gaps", 100 * replay.gaps, "%", replay.gaps, GAPS_GOAL),
        Figure(name, f"step of {rows} on the device", 1e3 * replay.seconds, "ms"),
        Figure(
            name, f"step of {rows} in service", subject.steps[rows] / replay.seconds, "x", None, HIDDEN_GOAL
        ),
    ]


def _host(subject: Subject) -> list[Figure]:
    """What a step of decodes takes of the host beside waiting for the device."""
    rows, engine, steps = subject.plan.steady, subject.engine, subject.plan.answer // 2
    requests = subject.texts(rows, subject.plan.context, subject.plan.answer)
    for request in requests:
        engine.submit(request)
    for _ in range(MOST_STEPS):
        if len(engine.scheduler.decoding) == rows:
            break
        engine.step()
    else:
        raise RuntimeError("some requests never came to decode")
    waited, start = engine.stats()["device_wait_seconds"], time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - start - (engine.stats()["device_wait_seconds"] - waited)
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    return [Figure(subject.name, f"host time, step of {rows}", 1e3 * seconds / steps, "ms")]


def _prefill(subject: Subject, rates: Rates) -> list[Figure]:
    """One prompt, from its submission to its first token."""
    tokens = subject.plan.prompt
    laps = [subject.run(subject.texts(1, tokens, 1)) for _ in range(subject.plan.rounds + 1)]
    seconds = median(max(lap.first) for lap in laps[1:])
    share = flops.prefill_flops(subject.bench.model.config, tokens) / seconds / rates.matrix
    name = prefill_name(subject.plan)
    return [Figure(subject.name, name, tokens / seconds, "tok/s", share, PREFILL_GOAL)]


def _encoder(subject: Subject, rates: Rates) -> list[Figure]:
    plan, model = subject.plan, subject.bench.model
    grid = encoder.grid_of(model, plan.picture)
    seconds = encoder.seconds(model, grid, plan.pictures, plan.rounds)
    share = flops.encoder_flops(model.config, [grid] * plan.pictures) / seconds / rates.matrix
    tokens = plan.pictures * grid[0] * grid[1] // model.config.vision.merge_size**2
    name = encoder_name(plan)
    return [Figure(subject.name, name, tokens / seconds, "tok/s", share, ENCODER_GOAL)]


def _first_token(subject: Subject) -> list[Figure]:
    laps = [subject.run([subject.picture(2)]) for _ in range(subject.plan.rounds + 1)]
    seconds = median(max(lap.first) for lap in laps[1:])
    return [Figure(subject.name, first_name(subject.plan), 1e3 * seconds, "ms")]


def _stalls(subject: Subject) -> list[Figure]:
    plan = subject.plan
    wanted = int(stalls.ROUNDS * (plan.seconds / stalls.PERIOD_S + 1))
    pictures: Iterator[PreparedRequest] = iter([subject.picture(8) for _ in range(wanted)])
    streams = subject.texts(STREAMS if subject.name != TINY else 2, 64, plan.stream)
    without, under = stalls.p99(subject.engine, streams, pictures, plan.seconds)
    return [
        Figure(subject.name, "ITL p99 under image load", under / without, "x", None, STALL_GOAL),
        Figure(subject.name, "ITL p99 without", 1e3 * without, "ms"),
    ]


def _captures(subject: Subject) -> list[Figure]:
    costs = subject.engine.runner.device.graph_costs()
    return [
        Figure(subject.name, f"graphs: {costs.graphs} captured", costs.seconds, "s"),
        Figure(subject.name, "graphs: memory", costs.nbytes / 2**20, "MiB"),
    ]


# ---------------------------------------------------------------- transformers


def compare(name: str, folder: Path, plan: Plan, device: torch.device, ledger: Ledger) -> str:
    """Put transformers' figures for the model ``name`` in ``folder`` beside ours; its version."""
    peer = Transformers(folder, device, plan.rounds)
    grid = encoder.grid_in(read_config(folder).vision, plan.picture)

    def decode(batch: int) -> None:
        sizes = (batch, plan.context, plan.peer_answer)
        ledger.compare(name, decode_name(batch), GENERATE, lambda: peer.decode(*sizes))

    def batching(batch: int) -> None:
        sizes = (batch, plan.context, plan.peer_answer)
        ledger.compare(name, decode_name(batch), BATCHING, lambda: peer.batching(*sizes))

    for batch in plan.peer_batches:
        decode(batch)
    ledger.compare(name, prefill_name(plan), GENERATE, lambda: peer.prefill(plan.prompt))
    ledger.compare(name, encoder_name(plan), GENERATE, lambda: peer.encode(grid, plan.pictures))
    ledger.compare(name, first_name(plan), GENERATE, lambda: 1e3 * peer.first_token(grid, TEXT))
    for batch in plan.peer_batches:
        batching(batch)
    return peer.version


def release(device: torch.device) -> None:
    """Give back what the last model took."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
