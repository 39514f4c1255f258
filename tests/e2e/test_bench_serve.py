"""``mmserve bench serve`` against servers on real sockets."""

import json
import time

import httpx
import pytest
from fake_service import FakeService
from live_server import serving

from mmserve.bench.client import chat
from mmserve.cli import main
from mmserve.core.config import Config

WORDS = 120
FAST = ["--size", "32x32", "--rounds", "1", "--warmup", "0", "--seed", "1"]


class Talkative(FakeService):
    """Says so many words to every question."""

    def __init__(self):
        super().__init__()
        self.scripts = self

    def get(self, question):
        return ["word "] * WORDS


@pytest.fixture(scope="module")
def url():
    with serving(Talkative(), Config()) as address:
        yield address


def rows_of(tmp_path, *flags):
    status = main(["bench", "serve", *flags, *FAST, "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["cores"] >= 1
    return status, report["rows"]


def test_presets_over_two_servers_have_a_row_each_and_ratios(url, tmp_path, capsys):
    named = ["--base-url", f"one={url}", "--base-url", f"two={url}/v1/", "--max-tokens", "5"]
    status, rows = rows_of(tmp_path, *named, "--scenario", "single,c8")
    assert status == 0
    assert [(name, list(by_server)) for name, by_server in rows.items()] == [
        ("single", ["one", "two"]),
        ("c8", ["one", "two"]),
    ]
    [row] = rows["c8"]["two"]
    assert (row["requests"], row["errors"], row["output tokens"], row["cached tokens"]) == (8, {}, 40, 24)
    assert 0 < row["TTFT p50 ms"] <= row["TTFT p99 ms"] <= row["e2e max ms"]
    shown = capsys.readouterr().out
    assert "× TTFT" in shown
    assert shown.count("| two |") == 2


def test_a_stream_is_measured_alone_and_beside_new_pictures(url, tmp_path):
    flags = ["--scenario", "images-beside-a-stream", "--max-tokens", "20", "--stream-tokens", "100"]
    status, rows = rows_of(tmp_path, "--base-url", f"one={url}", *flags)
    [row] = rows["images-beside-a-stream"]["one"]
    assert (status, row["errors"]) == (0, {})
    assert row["gaps"] > 5
    assert row["p99 / alone"] == pytest.approx(row["ITL p99 ms"] / row["ITL p50 alone ms"])


def test_a_stream_that_ends_before_the_pictures_is_told(url, tmp_path):
    flags = ["--scenario", "images-beside-a-stream", "--max-tokens", "60", "--stream-tokens", "10"]
    status, rows = rows_of(tmp_path, "--base-url", f"one={url}", *flags)
    assert status == 1
    assert rows["images-beside-a-stream"]["one"][0]["errors"] == {"stream too short": 1}


def test_a_load_of_ones_own_keeps_to_its_concurrency(tmp_path):
    service = Talkative()
    with serving(service, Config()) as address:
        while httpx.get(f"{address}/health/ready").status_code != 200:
            time.sleep(0.01)  # the probe is a request too
        service.most_running = 0
        flags = ["--requests", "9", "--concurrency", "3", "--max-tokens", "4", "--images", "none"]
        status, rows = rows_of(tmp_path, "--base-url", f"one={address}", *flags)
    asked = [chat for chat in service.seen if not chat.request_id.startswith("probe")]
    assert (status, rows["load"]["one"][0]["requests"], len(asked)) == (0, 9, 9)
    assert service.most_running == 3


def test_errors_are_counted_by_kind_and_told_by_the_status(url, tmp_path):
    flags = ["--requests", "2", "--concurrency", "2", "--images", "none", "--text-words", "3000"]
    status, rows = rows_of(tmp_path, "--base-url", f"one={url}", *flags)
    assert status == 1
    assert rows["load"]["one"][0]["errors"] == {"HTTP 400": 2}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--scenario", "c8", "--requests", "3"], "requests"),
        (["--scenario", "c9"], "c9"),
        (["--pid", "1", "--pid", "2"], "pid"),
        (["--base-url", "ftp://x"], "ftp://x"),
        (["--base-url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(url, flags, named, capsys):
    assert main(["bench", "serve", "--base-url", url, *flags, *FAST]) == 2
    assert named in capsys.readouterr().err


async def test_a_server_that_breaks_in_mid_stream_is_an_error_of_that_kind():
    with serving(FakeService(), Config()) as address:
        async with httpx.AsyncClient() as client:
            body = {"messages": [{"role": "user", "content": "fail"}], "stream": True}
            trace = await chat(client, f"{address}/v1/chat/completions", json.dumps(body).encode())
    assert trace.error == "broken stream"
    assert len(trace.pieces) >= 2
