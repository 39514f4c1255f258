"""GET /metrics over a real socket."""

import httpx
from fake_service import FakeService
from live_server import serving

from mmserve.core.config import Config


def test_metrics_are_told_without_a_key_and_show_no_words():
    service = FakeService()
    service.running = 2
    service.metrics.media("image", "refused")
    with serving(service, Config.of(api_key="k" * 20)) as url:
        answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert 'mmserve_media_total{kind="image",outcome="refused"} 1.0' in lines
    assert any(line.startswith("mmserve_requests_running ") for line in lines)


def test_only_the_path_itself_is_open():
    with serving(FakeService(), Config.of(api_key="k" * 20)) as url:
        assert httpx.get(f"{url}/metrics/").status_code == 401
        assert httpx.get(f"{url}/metricsx").status_code == 401
