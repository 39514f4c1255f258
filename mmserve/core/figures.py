"""The numbers of ``Service.stats`` as Prometheus shows them, read at the moment of a scrape."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Figure(NamedTuple):
    """How one key of ``Service.stats`` is shown."""

    name: str
    doc: str
    kind: Literal["gauge", "counter"] = "gauge"
    cache: str | None = None  # the label, where several caches share one name


_HITS, _MISSES = "Asked for and found", "Asked for and not found"

# Every number of ``Service.stats`` stands here; a test holds it.
FIGURES: dict[str, Figure] = {
    "running": Figure("requests_running", "Requests in the batch"),
    "waiting": Figure("requests_waiting", "Requests that wait for pages"),
    "parked": Figure("requests_parked", "Requests that wait for pixels which were dropped"),
    "steps": Figure("steps", "Steps of the engine", "counter"),
    "preemptions": Figure("preemptions", "Requests that gave their pages up and began again", "counter"),
    "expired": Figure(
        "requests_expired", "Requests whose deadline passed before their first token", "counter"
    ),
    "shed": Figure("requests_shed", "Requests given up for want of the device's memory", "counter"),
    "warmed": Figure("requests_warmed", "Requests that made a context ready to be asked about", "counter"),
    "carried_tokens": Figure(
        "carried_tokens", "Tokens whose keys and values outlived a drop of their session's window", "counter"
    ),
    "pixel_requests": Figure("pixel_requests", "Times that dropped pixels were asked for again", "counter"),
    "kv_pages": Figure("kv_pages", "Pages of the KV pool"),
    "kv_pages_free": Figure("kv_pages_free", "Pages of the KV pool that are free"),
    "kv_pages_cached": Figure("kv_pages_cached", "Pages of the KV pool that hold prefixes for whoever comes"),
    "prefix_nodes": Figure("prefix_nodes", "Nodes of the tree of cached prefixes"),
    "grammars_compiled": Figure("grammars_compiled", "Grammars compiled", "counter"),
    "grammars_reused": Figure("grammars_reused", "Grammars that were compiled already", "counter"),
    "encoded_items": Figure("encoded_items", "Vision items encoded", "counter"),
    "encoded_tokens": Figure("encoded_tokens", "Vision tokens encoded", "counter"),
    "encoder_slices": Figure("encoder_slices", "Slices of encoder work between two steps", "counter"),
    "encoder_batches_dropped": Figure(
        "encoder_batches_dropped",
        "Encoder batches given up half done: nobody wanted them any more",
        "counter",
    ),
    "decode_waits": Figure(
        "decode_waits", "Steps in which answers waited for pictures or prompts", "counter"
    ),
    "decode_wait_seconds": Figure("decode_wait_seconds", "Seconds that answers waited so", "counter"),
    "decode_wait_longest_seconds": Figure("decode_wait_longest_seconds", "The longest such wait"),
    "device_wait_seconds": Figure(
        "device_wait_seconds", "Seconds that the engine waited for results of steps in flight", "counter"
    ),
    "graphs": Figure("graphs", "Forwards that were captured, or recorded on a CPU"),
    "graph_seconds": Figure("graph_capture_seconds", "Seconds that this took"),
    "graph_bytes": Figure("graph_bytes", "Bytes of the GPU's memory that captured forwards hold"),
    "encoder_pool_bytes": Figure("encoder_pool_bytes", "Bytes of encoded pictures kept"),
    "encoder_pool_evictions": Figure(
        "encoder_pool_evictions", "Encoded pictures dropped for room", "counter"
    ),
    "process_restarts": Figure(
        "process_restarts", "Times that the engine or the detokenizer ended and was started again", "counter"
    ),
    "preparing": Figure("requests_preparing", "Requests whose media and text are being prepared"),
    "workers_alive": Figure("workers", "Preprocessing processes that answer"),
    "workers_lost": Figure("workers_lost", "Workers that ended or were killed over a job", "counter"),
    "workers_recycled": Figure("workers_recycled", "Workers replaced for their age or memory", "counter"),
    "jobs_queued": Figure("jobs_queued", "Pictures, clips and prompts that wait for a worker"),
    "jobs_done": Figure("jobs_done", "Jobs that workers did", "counter"),
    "jobs_failed": Figure("jobs_failed", "Jobs that ended with an error of the request", "counter"),
    "jobs_refused": Figure("jobs_refused", "Jobs refused for want of room or time", "counter"),
    "jobs_overdue": Figure("jobs_overdue", "Jobs that took longer than they may", "counter"),
    "jobs_lost": Figure("jobs_lost", "Jobs whose worker ended over them", "counter"),
    "jobs_cancelled": Figure("jobs_cancelled", "Jobs whose caller left", "counter"),
    "arena_bytes": Figure("arena_bytes", "Bytes of shared memory for pixels"),
    "arena_used_bytes": Figure("arena_used_bytes", "Bytes of it in use"),
    "token_pieces_hits": Figure("cache_hits", _HITS, "counter", "token_pieces"),
    "token_pieces_misses": Figure("cache_misses", _MISSES, "counter", "token_pieces"),
    "media_in_flight": Figure("media_in_flight", "Pictures and clips being decoded, or waiting for it"),
    "media_shared": Figure("media_shared", "Waits for what another request was having decoded", "counter"),
    "early_answers": Figure("early_answers", "Pictures and clips of which it is known what they become"),
    "early_answers_bytes": Figure("early_answers_bytes", "Bytes of what is known of them"),
    "early_answers_hits": Figure("cache_hits", _HITS, "counter", "early_answers"),
    "early_answers_misses": Figure("cache_misses", _MISSES, "counter", "early_answers"),
    "pixel_cache_bytes": Figure("pixel_cache_bytes", "Bytes of pixels kept until the encoder has them"),
    "pixel_cache_hits": Figure("cache_hits", _HITS, "counter", "pixels"),
    "pixel_cache_misses": Figure("cache_misses", _MISSES, "counter", "pixels"),
    "live_sessions": Figure("live_sessions", "Cameras that are watched"),
    "live_refused": Figure("live_refused", "Live sessions refused for want of room", "counter"),
    "live_load": Figure(
        "live_load", "Engine time that live sessions would take at full rate and pixels, in seconds a second"
    ),
    "live_slowed": Figure("live_slowed", "How many times fewer frames cameras send than they may"),
    "live_shrunk": Figure("live_shrunk", "How many times fewer pixels their frames have"),
    "live_frame_cost_seconds": Figure(
        "live_frame_cost_seconds", "Engine time that a frame takes, as measured lately"
    ),
    "live_context_tokens": Figure("live_context_tokens", "Tokens in the contexts of live sessions"),
    "live_kept_bytes": Figure(
        "live_kept_bytes", "Bytes of frames kept in case their pixels are asked for again"
    ),
    "media_store_items": Figure("media_store_items", "Media that callers stored or named"),
    "media_store_bytes": Figure("media_store_bytes", "Bytes of media that callers stored or named"),
    "media_store_evicted": Figure("media_store_evicted", "Stored media dropped for room", "counter"),
    "media_store_expired": Figure("media_store_expired", "Stored media dropped for their age", "counter"),
    "media_store_hits": Figure("cache_hits", _HITS, "counter", "media_store"),
    "media_store_misses": Figure("cache_misses", _MISSES, "counter", "media_store"),
}


class Figures(Collector):
    """The figures of a service at the moment of a scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is asked of the service before the first scrape

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for key, value in self._stats().items():
            if key in FIGURES:
                _add(families, FIGURES[key], float(value))
        return families.values()


def _add(families: dict[str, Metric], figure: Figure, value: float) -> None:
    name = f"mmserve_{figure.name}"
    labels = {} if figure.cache is None else {"cache": figure.cache}
    family = families.get(name)
    if family is None:
        make = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
        family = families[name] = make(name, figure.doc, labels=list(labels) or None)
    suffix = "_total" if figure.kind == "counter" else ""
    family.add_sample(name + suffix, labels, value)
