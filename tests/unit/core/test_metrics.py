"""What is told to Prometheus, and that each service has its own account."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mmserve.core.errors import EngineDead, MediaError
from mmserve.core.figures import FIGURES
from mmserve.core.messages import TextOutput, Timings, Usage
from mmserve.core.metrics import Metrics


def values(metrics):
    """{(sample name, label values): value} of everything that is told."""
    text = metrics.render().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def metrics():
    return Metrics(dict)


def test_stages_are_observed_by_name(metrics):
    metrics.stages({"decode": 0.02, "resize": 0.5})
    metrics.stages({"decode": 0.04})
    with metrics.timing("fetch"):
        pass
    told = values(metrics)
    assert told["mmserve_stage_seconds_count", "decode"] == 2
    assert told["mmserve_stage_seconds_sum", "decode"] == pytest.approx(0.06)
    assert told["mmserve_stage_seconds_count", "resize"] == 1
    assert told["mmserve_stage_seconds_count", "fetch"] == 1
    assert told["mmserve_stage_seconds_count", "layout"] == 0


def test_a_finished_request_is_counted_with_its_tokens_and_times(metrics):
    timings = Timings(arrived=10.0, scheduled=10.2, encoded=10.1)
    with metrics.request() as watch:
        for _ in range(3):
            watch.tokens(timings)
        usage = Usage(20, 3, 8, image_tokens=6, video_tokens=4)
        watch.said(TextOutput(request_id="r", text="so far"))
        watch.said(TextOutput(request_id="r", text="", finish_reason="stop", usage=usage))
    told = values(metrics)
    assert told["mmserve_requests_total", "stop"] == 1
    kinds = {kind: told["mmserve_prompt_tokens_total", kind] for kind in ("text", "image", "video", "cached")}
    assert kinds == {"text": 10, "image": 6, "video": 4, "cached": 8}
    assert told["mmserve_generated_tokens_total",] == 3
    assert told["mmserve_time_to_first_token_seconds_count",] == 1
    assert told["mmserve_inter_token_latency_seconds_count",] == 2
    assert told["mmserve_queue_seconds_sum",] == pytest.approx(0.2)
    assert told["mmserve_encode_seconds_sum",] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (MediaError("broken"), "refused"),
        (EngineDead("gone"), "error"),
        (RuntimeError("a fault"), "error"),
        (asyncio.CancelledError(), "abort"),
        (GeneratorExit(), "abort"),
    ],
)
def test_a_request_that_ends_with_an_error_is_counted_once(metrics, error, outcome):
    with pytest.raises(type(error)), metrics.request():
        raise error
    told = values(metrics)
    ended = {key[1]: count for key, count in told.items() if key[0] == "mmserve_requests_total"}
    assert {name for name, count in ended.items() if count} == {outcome}
    assert ended[outcome] == 1


def test_figures_are_read_at_each_scrape():
    stats = {"running": 3, "media_store_hits": 5, "workers": "threads"}
    metrics = Metrics(lambda: stats)
    assert values(metrics)["mmserve_requests_running",] == 3
    stats["running"] = 4
    told = values(metrics)
    assert told["mmserve_requests_running",] == 4
    assert told["mmserve_cache_hits_total", "media_store"] == 5
    assert not any("threads" in part for key in told for part in key)


def test_no_two_figures_share_a_series():
    series = [(f.name, f.cache) for f in FIGURES.values()]
    assert len(series) == len(set(series))


def test_two_services_count_apart(metrics):
    other = Metrics(dict)
    metrics.media("image", "decoded")
    assert values(metrics)["mmserve_media_total", "image", "decoded"] == 1
    assert values(other)["mmserve_media_total", "image", "decoded"] == 0
