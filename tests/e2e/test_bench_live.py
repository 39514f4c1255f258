"""``mmserve bench live`` in its short form, against a server with tiny-vl and one that has no room."""

import json

import pytest
from live_server import serving

from mmserve.bench.live import FATES, LoadRun, growth, load, static_shares
from mmserve.bench.live_camera import CameraRun, Plan
from mmserve.bench.live_scene import frames
from mmserve.bench.soak_watch import Memory
from mmserve.cli import main
from mmserve.core.config import Config
from mmserve.service import Service

SHORT = ["--seconds", "4", "--fps", "5", "--ask-every", "1", "--deadline-ms", "2000", "--max-tokens", "4"]


def test_a_server_of_its_own_is_measured_and_the_costs_of_cameras_told(tmp_path, capsys):
    path = tmp_path / "live.json"
    flags = ["--cameras", "1,2", "--rounds", "1", "--window", "3", "--threads", "1", "--size", "128x96"]
    flags += ["--idle", "2", "--idle-fps", "2"]
    assert main(["bench", "live", *SHORT, *flags, "--json", str(path)]) == 0, capsys.readouterr().err
    report = json.loads(path.read_text())
    assert [row["cameras"] for row in report["rows"]] == [1, 2]
    for row, told in zip(report["rows"], report["frames"], strict=True):
        assert row["CPU cores"] > 0
        assert row["MiB"] > 0
        assert row["kept/s"] > 0
        assert (row["idle"], row["idle held"]) == (2, 2)
        assert told["sent"] > 0
        known = sum(told[fate] for fate in FATES)
        assert known + told["not told"] == told["sent"]
    assert set(report["growth"]) == {"CPU cores", "MiB"}
    assert {"mmserve.processes.engine"} <= {row["process"] for row in report["memory"]}
    ahead, sent = report["window"]
    assert ahead["cached tokens"] > 0
    assert sent["cached tokens"] == 0, "all pictures are new"
    shown = capsys.readouterr().out
    assert "One camera more costs" in shown
    assert "watching ahead" in shown


async def test_cameras_for_which_there_is_no_room_are_counted_with_the_reason():
    service = Service.load(Config.of(max_live_sessions=1, drain_s=1))
    try:
        with serving(service, service.config) as url:
            plan = Plan(fps=5, seconds=2.5, ask_every=1, deadline_ms=1000, max_tokens=2, size=(64, 48))
            run = await load(url, plan, 2)
    finally:
        service.close()
    row = run.row()
    assert (row["cameras"], row["refused"], row["CPU cores"]) == (2, 1, None)
    assert any("1013" in fault for fault in run.faults)


def test_a_camera_is_sustained_when_nearly_all_of_its_answers_are_in_time():
    good, slow, gone = (CameraRun(asked=20, in_time=n) for n in (19, 18, 20))
    gone.ended = "it left"
    run = LoadRun([good, slow, gone, CameraRun()], seconds=2.0, cpu_s=1.0, memory=Memory(None), rises={})
    row = run.row()
    assert (row["sustained"], row["refused"], row["in time"], row["CPU cores"]) == (1, 1, "57 of 60", 0.5)


def test_growth_is_what_one_camera_more_costs():
    rows = [{"cameras": n, "scene": "moving", "CPU cores": 0.1 + 0.2 * n, "MiB": None} for n in (1, 3, 2)]
    still = {"cameras": 9, "scene": "static", "CPU cores": 0.0, "MiB": None}
    assert growth([*rows, still]) == {"CPU cores": pytest.approx(0.2)}
    assert growth(rows[:1]) == {}


def test_what_a_scene_that_stands_still_costs_is_told_of_what_one_does_that_moves():
    rows = [
        {"cameras": count, "scene": scene, "encoded": encoded}
        for scene, count, encoded in [("moving", 1, 200.0), ("moving", 4, 0.0), ("static", 1, 3.0)]
    ]
    assert static_shares(rows) == {1: 0.015}
    assert static_shares(rows[:2]) == {}


def test_processes_are_told_one_by_one_and_whether_they_grew():
    sizes = [{1: 100.0 + 5 * n, 2: 50.0} for n in range(30)]
    memory = Memory(1, sizes, {1: "api", 2: "engine"})
    rows = LoadRun([CameraRun()], seconds=15.0, cpu_s=None, memory=memory, rises={}).memory_rows()
    assert [(row["cameras"], row["process"], row["flat"]) for row in rows] == [
        (1, "api", False),
        (1, "engine", True),
    ]


def test_scenes_are_the_same_for_the_same_seed_and_no_two_frames_are_alike():
    again = [frames("static", (64, 48), 20, seed) for seed in (1, 1, 2)]
    assert again[0] == again[1]
    assert len({*again[0], *again[2]}) == 40
    assert len(set(frames("moving", (64, 48), 60, 1))) == 60


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--server", "http://127.0.0.1:1", "--kv-cache-mib", "9"], "kv_cache_mib"),
        (["--pid", "1"], "pid"),
        (["--server", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(flags, named, capsys):
    assert main(["bench", "live", *SHORT, *flags]) == 2
    assert named in capsys.readouterr().err
