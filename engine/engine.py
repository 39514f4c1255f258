"""The engine: prepared requests in, tokens out. One thread, one step at a time."""

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch

from mmserve.core.config import Config
from mmserve.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidGrammar,
    InvalidRequest,
    MMServeError,
    NoTokenAllowed,
    OutOfMemory,
)
from mmserve.core.messages import (
    CarryOver,
    FinishReason,
    PixelsWanted,
    PreparedRequest,
    TokenLogprob,
    TokenOutput,
    VisionItem,
)
from mmserve.encoders.transformer import VisionTransformer
from mmserve.engine.features import FeatureClaims
from mmserve.engine.grammar.base import Matcher
from mmserve.engine.grammar.desk import GrammarDesk
from mmserve.engine.grammar.thinking import steered
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.radix import RadixCache
from mmserve.engine.limits import answer_length, check_sampling
from mmserve.engine.making import (
    attention_over,
    encoder_graphs,
    encoder_stage,
    encoder_tokens,
    kv_pool,
    main_stream,
    max_model_len,
    overlap_of,
    stall_factor,
)
from mmserve.engine.mixing import Mixing
from mmserve.engine.runner.devices import device_for
from mmserve.engine.runner.overlap import Overlap
from mmserve.engine.runner.runner import Runner
from mmserve.engine.sampling.block import NO_TOKEN
from mmserve.engine.sampling.choose import sampler_for
from mmserve.engine.sampling.drawn import Drawn
from mmserve.engine.sampling.scoring import score_prompts
from mmserve.engine.scheduler.memory import Memory
from mmserve.engine.scheduler.request import Batch, Request, Status
from mmserve.engine.scheduler.scheduler import Scheduler
from mmserve.engine.session.carry import Carrier
from mmserve.engine.session.warm import warm_part
from mmserve.models.registry import LoadedModel

log = logging.getLogger(__name__)

LAUNCH_S = 1e-3  # of the host's time, for launching pictures beside decodes: about what a step hides


class Engine:
    """Owns the KV pool, the encoder pool and every request between ``submit`` and its last output."""

    def __init__(
        self,
        model: LoadedModel,
        config: Config,
        eos_ids: Iterable[int],
        grammars: GrammarDesk | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """ConfigError when the KV pool cannot hold ``max_model_len`` tokens. Without ``grammars`` no request
        may bring one. By ``clock`` the parts of steps are measured, in seconds."""
        self.model = model
        self.config = config
        self.eos_ids = frozenset(eos_ids)
        self.grammars = grammars
        self.device = device_for(model.device, eager=config.runner.enforce_eager)
        self.encoder_tokens = encoder_tokens(model, config)
        self.kv = kv_pool(model, config, self.device)
        self.max_model_len = max_model_len(model, config, self.kv)
        self.stage = encoder_stage(model, config, self.device)
        self.claims = FeatureClaims(self.stage)
        prefixes = RadixCache(self.kv.page_size) if config.cache.prefix_caching else None
        memory, several = Memory(self.kv.allocator, prefixes), len(config.server.api_keys) > 1
        self.scheduler = Scheduler(config.scheduler, memory, self.claims, several_owners=several)
        self.carrier = Carrier(self.kv, memory, model.config.text)
        self.runner = Runner(
            model.language,
            attention_over(self.kv, model, config, self.max_model_len),
            self.claims,
            self.device,
            config.scheduler.max_running,
        )
        self.sampler = sampler_for(model.device, model.config.text.vocab_size, model.dtype)
        self.overlap = overlap_of(config, self.device, clock)
        self._stream = main_stream(self.device)
        if not self.device.synchronous:
            self._capture()
        self.mixing = Mixing(stall_factor(model, config))
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._stalled = False
        self._steps = 0
        self._pixel_requests = 0
        self._expired = 0
        self._shed_requests = 0
        self._warmed = 0

    def _capture(self) -> None:
        with self._stream.use():
            self.runner.graphs.prepare()
        pictures = encoder_graphs(self.model, self.config, self.device)
        if pictures is not None:
            self.stage.capture(pictures)
        if isinstance(self.model.encoder, VisionTransformer):
            self.model.encoder.graphs = pictures
        costs = self.device.graph_costs()
        held = costs.nbytes / 2**30
        log.info("%d graphs were captured in %.1f s and hold %.2f GiB", costs.graphs, costs.seconds, held)

    # ------------------------------------------------------------ requests come and go

    def submit(self, prepared: PreparedRequest, matcher: Matcher | None = None) -> None:
        """Queue a request, whose answer ``matcher`` keeps to a form. InvalidRequest, ContextLengthExceeded,
        MediaError or Overloaded take nothing, nor does ConfigError, of a warm one without a prefix cache."""
        if prepared.adapter is not None:
            raise InvalidRequest("this engine has no adapters", param="adapter")
        if prepared.warm and self.scheduler.memory.prefixes is None:
            raise ConfigError("prefix_caching is off: nothing can be kept warm", param="prefix_caching")
        sampling = prepared.sampling
        check_sampling(sampling, self.model.config.text.vocab_size)
        max_tokens = answer_length(prepared, self.max_model_len)
        for item in prepared.items:
            self.stage.check(item)
            self.stage.pool.touch(item.digest)
        if prepared.request_id in self._requests:
            raise InvalidRequest(f"request id {prepared.request_id!r} is in use", param="request_id")
        if prepared.warm:
            prepared = warm_part(prepared, self.kv.page_size)
        request = Request(
            prepared=prepared,
            arrival=self._arrivals,
            max_tokens=max_tokens,
            stop_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self.eos_ids),
            table=PageTable(self.kv.page_size),
            steering=None if prepared.warm else steered(prepared.thinking, matcher),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
        )
        self.scheduler.add(request)
        self._requests[prepared.request_id] = request
        self._arrivals += 1

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request in whatever state, free all it holds, and return its last output; None if unknown."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, "abort")

    def supply(self, request_id: str, pixels: Mapping[bytes, np.ndarray]) -> TokenOutput | None:
        """Answer ``PixelsWanted``, and let the request go on. Its last output if some of these are missing,
        for asking again would get the same; a request that does not wait for pixels is left alone."""
        request = self._requests.get(request_id)
        if request is None or request.status is not Status.PARKED:
            return None
        request.take_pixels(pixels)
        if not request.wanted <= pixels.keys():
            return self._finish(request, "error", error="a picture could not be made again as it was")
        self.scheduler.unpark(request)
        return None

    def carry_over(self, order: CarryOver) -> Generator[None, None, int]:
        """Cache what a session keeps of its context under another salt, in turns between which steps are to
        stand; it returns how many tokens of it are cached, from the first on (see ``Carrier.carry`` for
        errors). A turn takes about as long as decodes may wait."""
        parts = self.carrier.carry(order)
        while (count := self._carry_turn(parts)) is None:
            yield
        return count

    def _carry_turn(self, parts: Generator[None, None, int]) -> int | None:
        """Parts for as long as it may take; what the last one tells."""
        decodes, start = len(self.scheduler.decoding), self._clock()
        most = self.mixing.beside_s(decodes)
        try:
            with self._stream.use():
                next(parts)
                while self._clock() - start < most:
                    next(parts)
        except StopIteration as end:
            return int(end.value)
        finally:
            self.mixing.stood(decodes, self._clock() - start)
        return None

    def holds(self, digest: bytes) -> bool:
        """Whether the features of ``digest`` are in the pool at this moment; any thread may ask."""
        return digest in self.stage.pool

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # ------------------------------------------------------------ the loop's body

    def step(self) -> list[TokenOutput | PixelsWanted]:
        """Compute one batch of tokens and, in turns with its prompts, a slice of the encoder's work (see
        ``Mixing``), and return what is new: of this batch or, where steps overlap, of the one before (see
        ``runner/overlap.py``).

        An error ends the requests that were part of it, with ``finish_reason`` "error"; it is raised
        only when the engine's state is no longer sound.
        """
        with self._stream.use():
            return self._step()

    def _step(self) -> list[TokenOutput | PixelsWanted]:
        decodes = len(self.scheduler.decoding)
        outputs: list[TokenOutput | PixelsWanted] = [*self._expire()]
        for work, seconds in self.stage.collect():
            self.mixing.encoded_apart(work, decodes, seconds)
        encoded = self._encoder_first() and self._encode(decodes, outputs)
        outputs += self._park_lacking()
        if self.overlap and self.scheduler.tight:
            outputs += self._land(self.overlap)
        batch = self.scheduler.schedule(self.mixing.prompt_tokens(decodes, encoded))
        if not encoded and not batch.prompts:
            encoded = self._encode(decodes, outputs)
        computed = self._compute(batch)
        warmed = self._finish_warmed()
        if self.stage.busy and not (batch or computed or warmed):
            self.stage.wait()
        self._stalled = not (batch or encoded or computed or warmed or self.stage.items)
        return [*outputs, *computed, *warmed]

    def _encoder_first(self) -> bool:
        """Whether it is the encoder's turn. Where the first prompt of all can go on, it does: its answer
        comes the sooner, and no picture the later, for the encoder has the steps when the prompt is done."""
        if not self.mixing.encoders_turn:
            return False
        first = min(self.scheduler.prefilling, key=lambda r: r.rank, default=None)
        return self.mixing.stall_factor is None or first is None or self._awaits_item(first)

    def _awaits_item(self, request: Request) -> bool:
        """Whether ``request`` has computed all that lies before an item which is not encoded."""
        items = request.items[request.items_held :]
        missing = next((i for i in items if i.digest not in self.stage.pool), None)
        return missing is not None and missing.span[0] <= request.computed_len

    def _encode(self, decodes: int, outputs: list[TokenOutput | PixelsWanted]) -> bool:
        """A slice of the batch in work or of the next one, if there is any to be had; whether there was."""
        if self.stage.busy:
            return False
        work = self.mixing.slice_work(decodes)
        items = self.stage.items or (self._next_batch() if work else ())
        if not work or not items:
            return False
        start = self._clock()
        try:
            if not self.stage.items:
                self.stage.begin(items)
            done = self.stage.advance(work, LAUNCH_S if decodes and not self.device.synchronous else inf)
        except torch.OutOfMemoryError as error:
            outputs += self._shed(self._owners(items), error)
        except Exception as error:
            outputs += self._fail(self._owners(items), error)
        else:
            if self.device.synchronous:
                self.mixing.encoded(done, decodes, self._clock() - start)
        return True

    def _next_batch(self) -> list[VisionItem]:
        """What to encode next: not at the cost of what running requests are about to use."""
        wanted = self.scheduler.next_items(self.encoder_tokens)
        if not wanted:
            return []
        batch = self.stage.next_batch(wanted, spare=self.claims.coming(self.scheduler.prefilling))
        if not batch and self._stalled:
            return wanted[:1]  # nothing can be computed without it: idle entries must make room
        return batch

    def _park_lacking(self) -> list[PixelsWanted]:
        lacking = self.scheduler.park_lacking()
        self._pixel_requests += len(lacking)
        return [PixelsWanted(request.request_id, request.wanted) for request in lacking]

    def _compute(self, batch: Batch) -> list[TokenOutput]:
        """Run ``batch`` and hand out its results; where steps overlap, launch it, and hand out those of the
        step before."""
        now = time.monotonic()
        for chunk in batch.prompts:
            chunk.request.scheduled = chunk.request.scheduled or now
        if self.overlap is None:
            return self._run(batch) if batch else []
        return self._launch(batch, self.overlap) if batch else self._land(self.overlap)

    def _run(self, batch: Batch) -> list[TokenOutput]:
        sampling = batch.sampling
        start, graphs = self._clock(), self.device.graph_costs().graphs
        try:
            logits = self.runner.run(batch)
            with torch.inference_mode():
                sampled = self.sampler.sample(logits[: len(sampling)], sampling) if sampling else []
                score_prompts(logits[len(sampling) :], batch.prompts)
        except Exception as error:
            return self._fail_step(batch, error)
        self._steps += 1
        self._took(batch, self._clock() - start, typical=self.device.graph_costs().graphs == graphs)
        self.scheduler.advance(batch)
        return [
            self._result(r, token, logprob) for r, (token, logprob) in zip(sampling, sampled, strict=True)
        ]

    def _launch(self, batch: Batch, overlap: Overlap) -> list[TokenOutput]:
        timer, graphs = overlap.timer(), self.device.graph_costs().graphs
        try:
            logits = self.runner.run(batch, overlap.feeding(batch))
        except Exception as error:
            return self._fail_launch(batch, error, overlap)
        outputs = self._land(overlap) if self.sampler.needs_words(batch.sampling) else []
        sampling = [request for request in batch.sampling if request.status is Status.RUNNING]
        try:
            drawn = self._draw(logits, batch, sampling)
        except Exception as error:
            return outputs + self._fail_launch(batch, error, overlap)
        self.scheduler.advance(batch)
        self.scheduler.drawing(sampling)
        typical = not self.stage.busy and self.device.graph_costs().graphs == graphs
        flight = overlap.launched(batch, sampling, drawn, timer, typical)
        outputs += self._land(overlap)
        overlap.flight = flight
        return outputs

    @torch.inference_mode()
    def _draw(self, logits: torch.Tensor, batch: Batch, sampling: list[Request]) -> Drawn | None:
        """A token for each of ``sampling``: those of the batch who have not ended meanwhile."""
        every = batch.sampling
        score_prompts(logits[len(every) :], batch.prompts)
        if not sampling:
            return None
        if len(sampling) < len(every):
            rows = [row for row, request in enumerate(every) if request.status is Status.RUNNING]
            return self.sampler.draw(logits[rows], sampling)
        return self.sampler.draw(logits[: len(every)], sampling)

    def _land(self, overlap: Overlap) -> list[TokenOutput]:
        """Handle the results of the step in flight, if there is one. An error here is the device's own."""
        flight = overlap.landing()
        if flight is None:
            return []
        results = flight.results()
        self._steps += 1
        self._took(flight.batch, flight.timer.seconds(), flight.typical)
        return [
            self._result(request, token, logprob)
            for request, (token, logprob) in results
            if request.status is not Status.FINISHED
        ]

    def _fail_launch(self, batch: Batch, error: Exception, overlap: Overlap) -> list[TokenOutput]:
        return self._land(overlap) + self._fail_step(batch, error)

    def _took(self, batch: Batch, seconds: float, typical: bool) -> None:
        """A step in which a forward was captured, or beside a slice of the encoder on a device that computes
        both at once, is not ``typical``."""
        decodes = len(batch.decodes)
        self.mixing.computed(batch.num_tokens - decodes, decodes, seconds, typical)

    def _result(self, request: Request, token: int, logprob: TokenLogprob | None) -> TokenOutput:
        if token == NO_TOKEN:
            return self._finish(request, "error", error=NoTokenAllowed.said, error_code=NoTokenAllowed.code)
        request.append(token)
        if request.steering and request.steering.fault:
            error = f"the answer cannot be kept to its form: {request.steering.fault}"
            return self._finish(request, "error", error=error, error_code=InvalidGrammar.code)
        request.first_token = request.first_token or time.monotonic()
        logprobs = None if logprob is None else (logprob,)
        if request.finish_reason:
            return self._finish(request, request.finish_reason, (token,), logprobs)
        return self._output(request, (token,), logprobs)

    # ------------------------------------------------------------ ends

    def _finish_warmed(self) -> list[TokenOutput]:
        """End the warm requests that are computed: what they are for is in the cache."""
        launched = self.overlap.launched_warm if self.overlap else ()
        warmed = [request for request in self.scheduler.warmed() if request not in launched]
        self._warmed += len(warmed)
        return [self._finish(request, "stop") for request in warmed]

    def _expire(self) -> list[TokenOutput]:
        """End the requests whose deadline passed before their first token."""
        late = self.scheduler.passed_deadlines(time.monotonic())
        self._expired += len(late)
        error = "the deadline of the request passed before its first token"
        return [self._finish(r, "error", error=error, error_code=DeadlineExceeded.code) for r in late]

    def _fail_step(self, batch: Batch, error: Exception) -> list[TokenOutput]:
        """``batch`` could not be computed, and nothing of it counts."""
        alive = [chunk.request for chunk in batch if chunk.request.status is not Status.FINISHED]
        if isinstance(error, torch.OutOfMemoryError):
            return self._shed(alive, error)
        return self._fail(alive, error)

    def _shed(self, requests: Sequence[Request], error: Exception) -> list[TokenOutput]:
        """There was no memory for these together: the newest ends, and the others try again without it."""
        newest = max(requests, key=lambda request: request.arrival, default=None)
        if newest is None:
            return []
        log.error("no memory for a step of %d requests; the newest ends", len(requests), exc_info=error)
        self._shed_requests += 1
        for request in requests:
            self.sampler.forget(request)  # it may have counted tokens that nobody will see
        outputs = [self._finish(newest, "error", error=OutOfMemory.said, error_code=OutOfMemory.code)]
        self.device.give_back()
        self.check_integrity()
        return outputs

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[TokenOutput]:
        log.error("a step failed; %d requests end with it", len(requests), exc_info=error)
        message = error.message if isinstance(error, MMServeError) else f"{type(error).__name__}: {error}"
        outputs = [self._finish(request, "error", error=message) for request in requests]
        self.check_integrity()
        return outputs

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenOutput:
        """Everything the request holds is free when this returns."""
        self.scheduler.finish(request, reason)
        self.sampler.forget(request)
        del self._requests[request.request_id]
        request.finished = time.monotonic()
        if self.stage.items and not self._owners(self.stage.items):
            self.stage.drop()
        return self._output(request, tokens, logprobs, error, error_code)

    def _output(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenOutput:
        return TokenOutput(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=request.take_scores() if tokens else None,
            finish_reason=request.finish_reason,
            error=error,
            error_code=error_code,
            prompt_tokens=request.prompt_len,
            cached_tokens=request.cached_len or 0,
            timings=request.timings(),
        )

    def _owners(self, items: Sequence[VisionItem]) -> list[Request]:
        digests = {item.digest for item in items}
        return [
            r
            for r in list(self._requests.values())
            if any(i.digest in digests for i in r.items[r.items_held :])
        ]

    # ------------------------------------------------------------ what others may know

    def stats(self) -> dict[str, Any]:
        """Counts and gauges for health, logs and metrics."""
        pages, prefixes = self.kv.allocator, self.scheduler.memory.prefixes
        return {
            "running": self.scheduler.num_running,
            "waiting": len(self.scheduler.waiting),
            "parked": len(self.scheduler.parked),
            "steps": self._steps,
            "requests": self._arrivals,
            "preemptions": self.scheduler.preemptions,
            "expired": self._expired,
            "shed": self._shed_requests,
            "warmed": self._warmed,
            "carried_tokens": self.carrier.carried_tokens,
            "pixel_requests": self._pixel_requests,
            "kv_pages": pages.total - 1,
            "kv_pages_free": pages.free,
            "kv_pages_cached": prefixes.evictable if prefixes else 0,
            "prefix_nodes": prefixes.nodes if prefixes else 0,
            "grammars_compiled": self.grammars.compiled if self.grammars else 0,
            "grammars_reused": self.grammars.reused if self.grammars else 0,
            "kv_page_size": self.kv.page_size,
            "encoded_items": self.stage.encoded_items,
            "encoded_tokens": self.stage.encoded_tokens,
            "encoder_slices": self.stage.slices,
            "encoder_batches_dropped": self.stage.dropped_batches,
            "decode_waits": self.mixing.waits,
            "decode_wait_seconds": self.mixing.wait_seconds,
            "decode_wait_longest_seconds": self.mixing.longest_wait_seconds,
            "device_wait_seconds": self.overlap.waited_seconds if self.overlap else 0.0,
            "graphs": self.device.graph_costs().graphs,
            "graph_seconds": self.device.graph_costs().seconds,
            "graph_bytes": self.device.graph_costs().nbytes,
            "encoder_pool_bytes": self.stage.pool.used_bytes,
            "encoder_pool_evictions": self.stage.pool.evictions,
        }

    def check_integrity(self) -> None:
        """AssertionError unless pages and pins are each free or owned, and by one request."""
        self.scheduler.check_integrity()
        self.sampler.check_integrity(self._requests.values())
        self.stage.check_integrity()
        scheduler = self.scheduler
        queued = scheduler.num_running + len(scheduler.waiting) + len(scheduler.parked)
        assert queued == len(self._requests), f"{len(self._requests)} requests, {queued} in the queues"
