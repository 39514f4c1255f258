"""What a service tells Prometheus: histograms and counters as things happen, figures when it is asked."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from mmserve.core.errors import MMServeError
from mmserve.core.figures import Figures
from mmserve.core.messages import TextOutput, Timings, Usage

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

STAGES = ("fetch", "queue", "decode", "resize", "prune", "digest", "template", "tokenise", "layout")
LIVE_STAGES = ("received", "gated", "decoded", "encoded", "prefilled", "first_token")
PROMPT_KINDS = ("text", "image", "video", "cached")
MediaOutcome = Literal["decoded", "cached", "refused", "failed"]
RequestOutcome = Literal["stop", "length", "abort", "error", "refused"]

_SHORT = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 3.0)
_WAIT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The measurements of one service, in a registry of its own.

    ``stats`` is asked at each scrape for the figures that need no observation. Everything else costs a
    microsecond or two where it happens: label values are looked up once, here.
    """

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Figures(stats))
        self._stages = self._histogram(
            "stage_seconds", "Seconds of preprocessing by stage", _SHORT, ["stage"]
        )
        for stage in STAGES:
            self._stages.labels(stage)  # so that a series stands at zero before its first observation
        media = self._counter("media", "Pictures and clips by what became of them", ["kind", "outcome"])
        self._media = {
            (kind, outcome): media.labels(kind, outcome)
            for kind in ("image", "video")
            for outcome in get_args(MediaOutcome)
        }
        requests = self._counter("requests", "Requests by how they ended", ["outcome"])
        self._requests = {outcome: requests.labels(outcome) for outcome in get_args(RequestOutcome)}
        prompt = self._counter(
            "prompt_tokens", "Tokens of prompts by kind; the cached ones are of the other kinds too", ["kind"]
        )
        self._prompt = {kind: prompt.labels(kind) for kind in PROMPT_KINDS}
        self._generated = self._counter("generated_tokens", "Tokens of answers")
        self._engine_queue = self._histogram("queue_seconds", "From arrival to the first step", _WAIT)
        self._encode = self._histogram("encode_seconds", "From arrival until all items are encoded", _WAIT)
        self._first = self._histogram(
            "time_to_first_token_seconds", "From the call to its first token", _WAIT
        )
        self.inter_token = self._histogram("inter_token_latency_seconds", "From token to token", _TOKEN)
        self._live_frames = self._counter("live_frames", "Frames of cameras by what became of them", ["fate"])
        self._live_ages = self._histogram(
            "live_frame_age_seconds", "Age of frames since capture when they passed a stage", _WAIT, ["stage"]
        )
        for stage in LIVE_STAGES:
            self._live_ages.labels(stage)
        self._live_answers = self._counter(
            "live_answers", "Answers about cameras by how they ended", ["outcome"]
        )

    # ------------------------------------------------------------ as things happen

    def stages(self, seconds: Mapping[str, float]) -> None:
        """What each stage of preprocessing took; their names are those of ``STAGES``."""
        for stage, spent in seconds.items():
            self._stages.labels(stage).observe(spent)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Observe what the block takes as one ``stage``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stages.labels(stage).observe(time.perf_counter() - start)

    def media(self, kind: Literal["image", "video"], outcome: MediaOutcome) -> None:
        self._media[kind, outcome].inc()

    @contextmanager
    def request(self) -> Iterator["RequestWatch"]:
        """Around one request, from its call to its end however it comes; counts it once."""
        watch = RequestWatch(self)
        try:
            yield watch
        except BaseException as error:
            watch.outcome = watch.outcome or _outcome(error)
            raise
        finally:
            self._requests[watch.outcome or "abort"].inc()

    def first_token(self, seconds: float, timings: Timings | None) -> None:
        """``seconds`` after its call a request has its first token; ``timings`` say what the engine did."""
        self._first.observe(seconds)
        if timings is None:
            return
        if timings.scheduled is not None:
            self._engine_queue.observe(timings.scheduled - timings.arrived)
        if timings.encoded is not None:
            self._encode.observe(timings.encoded - timings.arrived)

    def usage(self, usage: Usage) -> None:
        """Count the tokens of a request that has ended."""
        visual = usage.image_tokens + usage.video_tokens
        counts = (usage.prompt_tokens - visual, usage.image_tokens, usage.video_tokens, usage.cached_tokens)
        for kind, count in zip(PROMPT_KINDS, counts, strict=True):
            self._prompt[kind].inc(count)
        self._generated.inc(usage.completion_tokens)

    def live_frames(self, fate: str, count: int = 1) -> None:
        """``count`` frames of a camera have met their ``fate``."""
        self._live_frames.labels(fate).inc(count)

    def live_age(self, stage: str, seconds: float) -> None:
        """A frame was so old when it passed ``stage``, one of ``LIVE_STAGES``; first_token is the first of an
        answer that knew of it."""
        self._live_ages.labels(stage).observe(seconds)

    def live_answer(self, outcome: str) -> None:
        self._live_answers.labels(outcome).inc()

    # ------------------------------------------------------------ when asked

    def render(self) -> bytes:
        """All of it in Prometheus's text format (``CONTENT_TYPE``)."""
        return generate_latest(self.registry)

    def _histogram(
        self, name: str, doc: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(f"mmserve_{name}", doc, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, doc: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"mmserve_{name}", doc, labels, registry=self.registry)


class RequestWatch:
    """The times and counts of one request under way; one thread at a time."""

    def __init__(self, metrics: Metrics) -> None:
        self.outcome: RequestOutcome | None = None
        self._metrics = metrics
        self._started = time.monotonic()
        self._last: float | None = None

    def tokens(self, timings: Timings | None) -> None:
        """New tokens are here; call it once for each output of the engine that has any."""
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token(now - self._started, timings)
        else:
            self._metrics.inter_token.observe(now - self._last)
        self._last = now

    def said(self, output: TextOutput) -> None:
        """``output`` goes out; if it is the last one, its tokens are counted and its reason kept."""
        if output.finish_reason is not None:
            self.outcome = output.finish_reason
            self._metrics.usage(output.usage)


def _outcome(error: BaseException) -> RequestOutcome:
    """A refusal is the caller's to mend; whoever closes or cancels a request aborts it."""
    if isinstance(error, MMServeError):
        return "refused" if error.status < 500 else "error"
    return "error" if isinstance(error, Exception) else "abort"
