"""``mmserve bench soak`` in its short form, and that it finds what is wrong."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from fake_service import FakeService
from live_server import serving

from mmserve.bench.soak import Plan, passed, soak
from mmserve.cli import main
from mmserve.core.config import Config

COMMAND = [sys.executable, "-m", "mmserve.cli", "bench", "soak"]


def verdicts(report):
    return {line["check"]: line["verdict"] for line in report["checks"]}


def test_twenty_seconds_of_everything_leave_nothing_wrong_lost_or_behind(tmp_path, capsys):
    path = tmp_path / "soak.json"
    status = main(["bench", "soak", "--minutes", str(1 / 3), "--threads", "1", "--json", str(path)])
    shown = capsys.readouterr()
    assert status == 0, shown.out + shown.err
    report = json.loads(path.read_text())
    assert set(verdicts(report).values()) <= {"passed", "not judged"}
    assert len(report["kinds"]) == sum(kind["requests"] > 0 for kind in report["kinds"]) == 15
    assert {row["process"] for row in report["memory"]} >= {"mmserve.cli", "mmserve.preprocess.pool.worker"}


def test_ctrl_c_ends_the_traffic_and_what_was_seen_is_still_told():
    with serving(FakeService(), Config()) as url:
        process = subprocess.Popen(
            [*COMMAND, "--minutes", "60", "--base-url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while "traffic" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            shown, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    assert "| nothing was left in the server | passed |" in shown, errors
    assert process.returncode in (0, 1), "it passed or failed, and was not torn down"


async def test_a_server_that_goes_away_fails_and_what_was_seen_is_still_told(monkeypatch):
    monkeypatch.setattr("mmserve.bench.soak.SETTLE_S", 0.2)
    plan, told = Plan(seconds=3.0, concurrency=2), []
    with serving(FakeService(), Config()) as url:
        run = asyncio.create_task(soak(url, None, plan, told.append))
        while not told:
            await asyncio.sleep(0.01)
    report = await run
    found = {line["check"]: line["verdict"] for line in report.checks(plan)}
    assert found["it is ready afterwards"] == found["nothing was left in the server"] == "FAILED"
    assert any("ConnectError" in line for line in told)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--base-url", "http://127.0.0.1:1", "--kv-cache-mib", "9"], "kv_cache_mib"),
        (["--pid", "1"], "pid"),
        (["--base-url", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (["--model", "/nowhere/at/all"], "did not start: mmserve serve: there is no model folder"),
    ],
)
def test_what_cannot_be_soaked_is_said(flags, named, capsys):
    assert main(["bench", "soak", "--minutes", "0.01", *flags]) != 0
    assert named in capsys.readouterr().err


class Wrong(FakeService):
    """Says another thing every time, and keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.scripts = self

    def get(self, question):
        self.calls += 1
        return [f"word {self.calls}"]

    def stats(self):
        return {
            "running": 1,
            "kv_pages": 9,
            "kv_pages_free": 4,
            "kv_pages_cached": 2,
            "workers_lost": self.calls,
        }


async def test_a_server_that_is_wrong_fails_in_every_respect(monkeypatch):
    monkeypatch.setattr("mmserve.bench.soak.SETTLE_S", 0.2)
    with serving(Wrong(), Config()) as url:
        plan, told = Plan(seconds=2.0, concurrency=4), []
        report = await soak(url, None, plan, told.append)
    checks = report.checks(plan)
    found = {line["check"]: line["verdict"] for line in checks}
    assert not passed(checks)
    assert found["known answers stayed the same"] == "FAILED"
    assert found["requests were answered as they must be"] == "FAILED", "its schemas are no JSON"
    assert found["no process was lost or restarted"] == "FAILED"
    assert report.left == {"requests_running": 1, "pages in use": 3}
    assert report.ready
    assert any("instead of" in line for line in told)
