"""``mmserve bench gpu`` tried out on a CPU: what it measures there is nobody's test, that it measures is."""

import json
import logging

import pytest
import torch
from helpers.dummy_model import write_dummy_model

from mmserve.bench import flops, gpu, gpu_rates, stalls
from mmserve.bench.figures import Budget, Figure, Goal, Ledger
from mmserve.bench.offline import Bench, Shape
from mmserve.bench.peers import Transformers
from mmserve.bench.shapes import SHAPES, TINY, write_shape
from mmserve.cli import main
from mmserve.core.config import Config
from mmserve.models.config import read_config, read_json

CPU = torch.device("cpu")


def test_a_trial_measures_everything_once(tmp_path, capsys):
    files = ["--json", str(tmp_path / "found.json"), "--markdown", str(tmp_path / "found.md")]
    shape = [
        "--device",
        "cpu",
        "--trial",
        "--shapes",
        TINY,
        "--no-peers",
        "--page-size",
        "8",
        "--threads",
        "1",
    ]
    assert main(["bench", "gpu", *shape, *files]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    figures = {figure["figure"]: figure for figure in found["figures"]}
    assert [name for name, figure in figures.items() if figure["error"]] == ["launch gaps"]
    assert {"decode, batch 1", "decode, batch 2", "prefill, 48 tokens", "host time, step of 2"} <= set(
        figures
    )
    assert all(f["value"] > 0 and f["share"] > 0 for n, f in figures.items() if n.startswith("decode"))
    assert figures["decode, batch 1"]["goal"] == {"least": 0.8, "most": None}
    assert found["asked"]["page_size"] == 8
    assert found["trial"]
    table = (tmp_path / "found.md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert "none of this is a figure" in table


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--shapes", "qwen9"], "unknown shape 'qwen9'; known: qwen3-vl-2b, qwen3-vl-8b, tiny"),
        (["--device", "auto"], "no NVIDIA GPU; --device cpu --trial tries everything out"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_measured_is_said(args, said, capsys):
    assert main(["bench", "gpu", *args]) == 2
    assert said in capsys.readouterr().err


def test_without_time_figures_are_left_out_and_say_so():
    kept = []
    ledger = Ledger(Budget(0.0), lambda figures: kept.append(len(figures)))
    ledger.measure("m", "decode", "tok/s", lambda: 1 / 0)
    ledger.compare("m", "decode", "other", lambda: 1 / 0)
    [figure] = ledger.figures
    assert figure.row(["other"])["measured"] == "not measured: no time was left"
    assert figure.peers == {"other": "no time was left"}
    assert kept == [1, 1]


def test_a_figure_that_fails_costs_the_others_nothing():
    ledger = Ledger(Budget(60.0), lambda figures: None)
    ledger.measure("m", "a", "ms", lambda: 1 / 0)
    ledger.measure("m", "b", "ms", lambda: [Figure("m", "b", 2.0, "ms")])
    ledger.compare("m", "b", "other", lambda: 3.0)
    rows = [figure.row(["other"]) for figure in ledger.figures]
    assert [row["measured"] for row in rows] == ["ZeroDivisionError: division by zero", "2 ms"]
    assert [row["other"] for row in rows] == [None, "3 ms"]


def test_goals_are_of_shares_where_there_are_any():
    assert Figure("m", "f", 900.0, "tok/s", 0.79, Goal(least=0.8)).met is False
    assert Figure("m", "f", 900.0, "tok/s", 0.81, Goal(least=0.8)).row([])["goal"] == ">= 80 %"
    assert Figure("m", "f", 1.1, "x", None, Goal(most=1.2)).row([])["met"] == "yes"
    assert Figure("m", "f", 1.3, "x").met is None
    assert Figure("m", "f", 12345.6, "tok/s").row([])["measured"] == "12,346 tok/s"


def test_kernels_that_run_beside_each_other_count_once():
    assert gpu_rates.covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.5)]) == pytest.approx(4.0)
    assert gpu_rates.covered([]) == 0


@pytest.mark.parametrize(
    ("name", "billions", "vision"), [("qwen3-vl-2b", 1.72, 24), ("qwen3-vl-8b", 7.57, 27)]
)
def test_shapes_are_those_of_the_published_models(tmp_path, name, billions, vision):
    config = read_config(write_shape(name, tmp_path))
    assert flops.weight_bytes(config, 1) / 1e9 == pytest.approx(billions, abs=0.01)
    assert (config.vision.depth, config.text.head_dim, config.text.mrope_section) == (
        vision,
        128,
        (24, 20, 20),
    )
    assert (config.text.mrope_interleaved, config.text.qk_norm) == (True, True)
    assert config.vision.out_hidden_size == config.text.hidden_size
    assert read_json(tmp_path / "preprocessor_config.json")["size"]["longest_edge"] >= 1024 * 1024
    assert set(SHAPES) >= {name, TINY}


def test_an_answer_that_ends_under_load_is_no_figure(tmp_path):
    bench = Bench(Config.of(model=str(write_dummy_model(tmp_path)), load_format="dummy", kv_cache_mib=8))
    streams = [bench.request(Shape(text=4, pictures=0, answer=3), seed) for seed in range(2)]
    with pytest.raises(RuntimeError, match="ended before"):
        stalls.p99(bench.engine(), streams, iter(()), 5.0)


def test_transformers_stands_beside(tmp_path):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    peer = Transformers(write_shape(TINY, tmp_path), CPU, rounds=1)
    assert peer.prefill(8) > 0
    assert peer.first_token((4, 4), 3) > 0
    assert peer.encode((4, 4), 2) > 0


def test_more_tokens_than_asked_for_are_never_waited_for():
    """Whoever changes the plan sees that answers under load last, and fit."""
    plan = gpu.Plan()
    assert plan.stream > 2 * stalls.ROUNDS * plan.seconds * 1000
    assert plan.longest >= plan.prompt + 64
    assert plan.steady == 64
    assert gpu.TRIAL.steady == 2
