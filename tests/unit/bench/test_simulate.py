"""The simulator: its clock is arithmetic, so its figures can be said beforehand."""

import json

import pytest

from mmserve.bench.arrivals import Arrival, cameras, chats, recorded
from mmserve.bench.paper import HARDWARE, SHAPES, Costs, Hardware, Shape
from mmserve.bench.simulate import Simulation
from mmserve.cli import main
from mmserve.core.config import SchedulerOptions
from mmserve.core.errors import ConfigError

PLAIN = Hardware(bandwidth=1e9, flops=1e12, memory=4e9, host_s=0.001, source="a test")
SMALL = Shape(weights=1e6, vision=1e6, layers=2, heads=2, kv_heads=1, head_dim=8)
COSTS = Costs(PLAIN, SMALL)


def simulated(arrivals, costs=COSTS, **options):
    simulation = Simulation(arrivals, costs, SchedulerOptions(**options))
    return simulation, simulation.run()


def without_host(row):
    return {name: value for name, value in row.items() if not name.startswith("host")}


def test_a_step_takes_what_reading_the_weights_takes_or_the_arithmetic_if_longer():
    reading = 2 * SMALL.weights / PLAIN.bandwidth
    assert COSTS.step([(9, 10)]) == pytest.approx(0.001 + reading + 10 * SMALL.kv_bytes / 1e9)
    many = COSTS.step([(0, 100_000)])
    work = 2 * SMALL.weights * 100_000 + 4 * 2 * 2 * 8 * (100_000 * 100_000 // 2)
    assert many == pytest.approx(0.001 + work / 1e12 + 100_000 * SMALL.kv_bytes / 1e9)


def test_half_attained_is_twice_the_time():
    half = Costs(PLAIN, SMALL, attained=0.5)
    assert half.encode(1000) == pytest.approx(2 * COSTS.encode(1000))


def test_one_request_alone_is_served_as_the_costs_say():
    arrival = Arrival(at=1.0, prompt_tokens=20, output_tokens=3)
    simulation, row = simulated([arrival])
    first = COSTS.step([(0, 20)])
    assert simulation.first == [pytest.approx(first)]
    assert simulation.between == [
        pytest.approx(COSTS.step([(20, 21)])),
        pytest.approx(COSTS.step([(21, 22)])),
    ]
    assert (row["requests"], row["refused %"], row["late %"]) == (1, 0.0, 0.0)


def test_a_picture_is_encoded_before_its_tokens_are_computed_and_once():
    arrivals = [
        Arrival(at=at, prompt_tokens=4, output_tokens=1, image_tokens=(32,), images=("same",))
        for at in (0.0, 5.0)
    ]
    simulation, _ = simulated(arrivals)
    assert simulation.stage.encoded_tokens == 32
    assert simulation.first[0] == pytest.approx(COSTS.encode(32) + COSTS.step([(0, 36)]))
    assert simulation.first[1] == pytest.approx(COSTS.step([(32, 36)]))  # two pages of 16 are cached


@pytest.mark.parametrize("make", [lambda seed: cameras(40, 10, seed), lambda seed: chats(8, 5, seed)])
def test_a_seed_says_it_all(make):
    first, again, other = (without_host(simulated(make(seed))[1]) for seed in (1, 1, 2))
    assert first == again != other


def test_everyone_is_answered_refused_or_late():
    arrivals = cameras(300, 10, 0, deadline_ms=400)
    slow = Costs(Hardware(1e9, 5e9, 4e9, 0.01, "a test"), SMALL)
    simulation, row = simulated(arrivals, slow, max_waiting=20)
    assert simulation.done + simulation.late + simulation.refused == len(arrivals)
    assert min(simulation.done, simulation.late, simulation.refused) > 0
    assert row["late %"] == 100 * simulation.late / len(arrivals)


def test_few_pages_preempt_and_everything_still_ends():
    tight = Costs(Hardware(1e9, 1e12, 4e6 + 30 * 16 * SMALL.kv_bytes, 0.001, "a test"), SMALL)
    arrivals = [Arrival(at=0.0, prompt_tokens=100, image_tokens=(16,), output_tokens=200) for _ in range(6)]
    simulation, row = simulated(arrivals, tight)
    assert (simulation.done, row["preempted"] > 0) == (6, True)


def test_a_prompt_that_fits_nowhere_is_said_and_not_waited_for():
    tight = Costs(Hardware(1e9, 1e12, 4e6 + 10 * 16 * SMALL.kv_bytes, 0.001, "a test"), SMALL)
    with pytest.raises(RuntimeError, match="stands still"):
        simulated([Arrival(at=0.0, prompt_tokens=1000, output_tokens=1)], tight)


def test_cameras_ask_about_their_last_frames_each_at_its_own_phase():
    asked = cameras(2, 25, 0, every=10, window=2)
    assert len(asked) in (4, 5, 6)
    assert [a.at for a in asked] == sorted(a.at for a in asked)
    one = next(a for a in asked if a.at > 10)
    camera, newest = one.images[-1].split("/")
    assert int(newest) == int(one.at)
    assert one.images[0] == f"{camera}/{int(newest) - 1}"


def test_recorded_traffic_is_read_and_a_bad_line_is_named(tmp_path):
    file = tmp_path / "traffic.jsonl"
    lines = [
        {"at": 2.0, "prompt_tokens": 5, "output_tokens": 2, "owner": "b"},
        {"at": 1.0, "prompt_tokens": 5, "output_tokens": 2, "image_tokens": [64, 64]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [a.at for a in recorded(file)] == [1.0, 2.0]
    file.write_text(json.dumps(lines[0]) + '\n{"at": "soon"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        recorded(file)


@pytest.mark.parametrize("name", HARDWARE)
def test_the_smaller_shape_has_room_on_all_hardware_and_sources_are_named(name):
    assert Costs(HARDWARE[name], SHAPES["qwen2.5-vl-3b"]).pages(16) > 500
    assert "data sheet" in HARDWARE[name].source or "JEDEC" in HARDWARE[name].source


def test_the_command_prints_a_row_for_each_load(tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--load", "1,20", "--seconds", "10", "--max-running", "8", "--json", str(out)]
    assert main(["bench", "simulate", *flags]) == 0
    table = capsys.readouterr().out
    assert "data sheet" in table
    assert [row["cameras"] for row in json.loads(out.read_text())["rows"]] == [1, 20]


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="no room"):
        Costs(HARDWARE["orin-nano"], SHAPES["qwen2.5-vl-7b"]).pages(16)


def test_the_command_names_traffic_that_is_none(capsys):
    assert main(["bench", "simulate", "--traffic", "nothing"]) != 0
    assert "traffic must be cameras, chats or a file" in capsys.readouterr().err
