"""GET /metrics over a real socket."""

import asyncio
import base64

import httpx
import numpy as np
from fake_service import FakeService
from helpers.media_files import picture_file
from helpers.realtime_client import PATIENCE_S, joined
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


async def test_clients_of_realtime_are_counted_while_they_are_connected():
    with serving(FakeService(), Config()) as url:
        async with httpx.AsyncClient(base_url=url) as web:

            async def clients():
                lines = (await web.get("/metrics")).text.splitlines()
                [line] = [line for line in lines if line.startswith("mmserve_realtime_clients ")]
                return float(line.split()[1])

            assert await clients() == 0
            async with joined(url), joined(url):
                assert await clients() == 2
            async with asyncio.timeout(PATIENCE_S):
                while await clients():
                    await asyncio.sleep(0.05)


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()
