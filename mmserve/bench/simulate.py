"""The real scheduler, pages, prefix tree and encoder stage under traffic, with a clock and a runner that are
arithmetic.

Everything that decides is what serves: ``Scheduler``, ``Memory``, ``RadixCache``, ``EncoderStage``,
``FeatureClaims``. What takes time is taken from ``paper.Costs``: a step of the language model, and a batch of
the encoder before it. The same seed gives the same figures, but for the host's own time a step, which is
measured.
"""

import time
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

from mmserve.bench.arrivals import Arrival
from mmserve.bench.paper import Costs
from mmserve.core.config import SchedulerOptions
from mmserve.core.digest import framed_digest
from mmserve.core.errors import MediaError, Overloaded
from mmserve.core.messages import PreparedRequest, SamplingParams, VisionItem
from mmserve.encoders.parts import Resumable
from mmserve.encoders.pool import EmbeddingPool
from mmserve.encoders.stage import EncoderStage
from mmserve.engine.features import FeatureClaims
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pages import PageAllocator
from mmserve.engine.kv.radix import RadixCache
from mmserve.engine.scheduler.memory import Memory
from mmserve.engine.scheduler.request import Batch, Request
from mmserve.engine.scheduler.scheduler import Scheduler

TOKEN = 7
ENCODED_TOKENS = 1 << 18  # room of the pool of encoded pictures, a byte each
PIXELS = np.zeros((1, 2, 2, 3), np.uint8)  # of every picture: nobody looks at them


class PaperEncoder:
    """``VisionEncoder`` whose features are a byte a token and mean nothing; its time is told by the costs."""

    def forward(self, pixels: list[torch.Tensor], grids: list[tuple[int, int]]) -> list[torch.Tensor]:
        return Resumable(self.parts(pixels, grids)).finish()

    def parts(
        self, pixels: list[torch.Tensor], grids: list[tuple[int, int]]
    ) -> Generator[float, None, list[torch.Tensor]]:
        yield 0.0
        return [torch.empty(h * w, 1, 1, dtype=torch.uint8) for h, w in grids]


class Simulation:
    """One server under ``arrivals``, which are in the order of their moments."""

    def __init__(
        self, arrivals: Sequence[Arrival], costs: Costs, options: SchedulerOptions, page_size: int = 16
    ) -> None:
        self.arrivals, self.costs = arrivals, costs
        self.encoder_tokens = options.encoder_tokens or 4096
        self.page_size = page_size
        pool = EmbeddingPool(ENCODED_TOKENS)
        self.stage = EncoderStage(PaperEncoder(), self.encoder_tokens, pool, merge_size=1, token_bytes=1)
        self.claims = FeatureClaims(self.stage)
        self.pages = PageAllocator(costs.pages(page_size))
        several = len({arrival.owner for arrival in arrivals}) > 1
        memory = Memory(self.pages, RadixCache(page_size))
        self.scheduler = Scheduler(options, memory, self.claims, several_owners=several)
        self.now = 0.0
        self.tokens = self.late = self.refused = self.done = self.most_pages = self.most_running = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.first: list[float] = []  # seconds from arrival to first token
        self.between: list[float] = []  # seconds from token to token
        self.host: list[float] = []  # seconds that the scheduler itself took, a step
        self._spoke: dict[Request, float] = {}  # when a request had its last token
        self._came = 0
        self._stalled = False

    def run(self) -> dict[str, Any]:
        """Until everyone has an answer, or was refused or late."""
        while self._arrive():
            self._step()
        self.scheduler.check_integrity()
        return self.figures()

    def _arrive(self) -> bool:
        """Take who has come by now, or wait for the next; False when nobody is left."""
        arrivals = self.arrivals
        if not self.scheduler.has_work and self._came < len(arrivals):
            self.now = max(self.now, arrivals[self._came].at)
        while self._came < len(arrivals) and arrivals[self._came].at <= self.now:
            self._submit(arrivals[self._came], self._came)
            self._came += 1
        return self.scheduler.has_work or self._came < len(arrivals)

    def _submit(self, arrival: Arrival, number: int) -> None:
        request = Request(
            prepared=prepared(arrival, number),
            arrival=number,
            max_tokens=arrival.output_tokens,
            stop_ids=frozenset(),
            table=PageTable(self.page_size),
            arrived=arrival.at,
        )
        try:
            for item in request.items:
                self.stage.check(item)
            self.scheduler.add(request)
        except (MediaError, Overloaded):
            self.refused += 1

    def _step(self) -> None:
        """``Engine.step`` with the clock moved in place of the work."""
        scheduler = self.scheduler
        for request in scheduler.passed_deadlines(self.now):
            scheduler.finish(request, "error")
            self.late += 1
        start = time.perf_counter()
        wanted = scheduler.next_items(self.encoder_tokens)
        spent = time.perf_counter() - start
        encoded = self._encode(wanted)
        start = time.perf_counter()
        lacking = scheduler.park_lacking()
        batch = scheduler.schedule()
        spent += time.perf_counter() - start
        self._supply(lacking)
        stalled_before, self._stalled = self._stalled, not batch and not encoded
        if self._stalled and stalled_before and not lacking and scheduler.has_work:
            raise RuntimeError("the simulated server stands still: a prompt is larger than its pages or pool")
        self.now += self.costs.step((c.start, c.stop) for c in batch) if batch else 0.0
        start = time.perf_counter()
        scheduler.advance(batch)
        self.host.append(spent + time.perf_counter() - start)
        self._sample(batch)

    def _encode(self, wanted: list[VisionItem]) -> int:
        """The next batch of ``wanted`` items, chosen as the engine does; how many tokens it has."""
        batch = self.stage.next_batch(wanted, spare=self.claims.coming(self.scheduler.prefilling))
        batch = batch or (wanted[:1] if self._stalled else [])
        if not batch:
            return 0
        tokens = sum(map(self.stage.cost, batch))
        self.stage.encode_batch(batch)
        self.now += self.costs.encode(tokens)
        return tokens

    def _supply(self, lacking: list[Request]) -> None:
        """Pixels that were dropped are there again at once."""
        for request in lacking:
            request.take_pixels(dict.fromkeys(request.wanted, PIXELS))
            self.scheduler.unpark(request)

    def _sample(self, batch: Batch) -> None:
        self.most_running = max(self.most_running, self.scheduler.num_running)
        self.most_pages = max(self.most_pages, self.pages.total - 1 - self.scheduler.memory.available)
        for request in batch.sampling:
            request.append(TOKEN)
            self.tokens += 1
            last = self._spoke.get(request)
            if last is None:
                self.first.append(self.now - request.arrived)
            else:
                self.between.append(self.now - last)
            self._spoke[request] = self.now
            if request.finish_reason:
                self._end(request)

    def _end(self, request: Request) -> None:
        del self._spoke[request]
        self.scheduler.finish(request, "length")
        self.done += 1
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.cached_len or 0

    def figures(self) -> dict[str, Any]:
        """One row of the table: times in ms, shares in percent, the host's own in microseconds."""
        offered, seconds = max(len(self.arrivals), 1), max(self.now, 1e-9)
        return {
            "requests": len(self.arrivals),
            "req/s": self.done / seconds,
            "tok/s": self.tokens / seconds,
            **{f"TTFT p{p}": 1e3 * _percentile(self.first, p) for p in (50, 95, 99)},
            **{f"ITL p{p}": 1e3 * _percentile(self.between, p) for p in (50, 99)},
            "refused %": 100 * self.refused / offered,
            "late %": 100 * self.late / offered,
            "preempted": self.scheduler.preemptions,
            "cached %": 100 * self.cached_tokens / max(self.prompt_tokens, 1),
            "pages %": 100 * self.most_pages / (self.pages.total - 1),
            "running": self.most_running,
            "host µs": 1e6 * _percentile(self.host, 50),
            "host p99 µs": 1e6 * _percentile(self.host, 99),
        }


def prepared(arrival: Arrival, number: int) -> PreparedRequest:
    """The engine's request: ids mean nothing, keys are equal where the prompts are."""
    sizes = (arrival.prefix_tokens, *arrival.image_tokens, arrival.prompt_tokens)
    images = arrival.images or tuple(f"{number}-{i}" for i in range(len(arrival.image_tokens)))
    digests = [framed_digest("picture", name) for name in images]
    names = [framed_digest("prefix", arrival.prefix), *digests, framed_digest("own", number)]
    ends = np.cumsum(sizes).tolist()
    total = ends[-1]
    return PreparedRequest(
        request_id=str(number),
        token_ids=np.zeros(total, np.int32),
        radix_keys=np.concatenate([_keys(name, size) for name, size in zip(names, sizes, strict=True)]),
        positions=np.zeros((3, total), np.int32),
        position_delta=0,
        items=tuple(
            VisionItem(digest=digest, kind="image", grid=(1, last - first), span=(first, last), pixels=PIXELS)
            for digest, first, last in zip(digests, ends, ends[1:], strict=False)
        ),
        sampling=SamplingParams(),
        owner=arrival.owner,
        priority=arrival.priority,
        deadline=None if arrival.deadline_ms is None else arrival.at + arrival.deadline_ms / 1000,
    )


def _keys(name: bytes, size: int) -> np.ndarray:
    return int.from_bytes(name[:7], "little") + np.arange(size, dtype=np.int64)


def _percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")
