"""GET /metrics over a real socket."""

import base64

import httpx
import numpy as np
from fake_service import FakeService
from helpers.media_files import picture_file
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


def test_what_it_takes_to_get_media_is_a_stage():
    with serving(FakeService(), Config()) as url:
        part = {"type": "image_url", "image_url": data_url(picture_file(np.zeros((8, 8, 3), np.uint8)))}
        messages = [{"role": "user", "content": [part, part]}]
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert 'mmserve_stage_seconds_count{stage="fetch"} 2.0' in lines


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()
