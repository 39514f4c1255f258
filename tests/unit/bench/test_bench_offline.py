"""``mmserve bench latency``, ``throughput`` and ``encoder`` on a small model; how fast is nobody's test."""

import json

import pytest
import torch
from helpers.dummy_model import write_dummy_model

from mmserve.bench import roofline
from mmserve.bench.encoder import grid_of
from mmserve.bench.offline import Bench, Shape, lap
from mmserve.cli import main
from mmserve.core.config import Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_dummy_model(tmp_path_factory.mktemp("dummy"))


@pytest.fixture(scope="module")
def bench(folder):
    return Bench(Config.of(model=str(folder), load_format="dummy", dtype="float32", kv_cache_mib=8))


@pytest.fixture
def quick(monkeypatch):
    """Rates that are measured in no time."""
    for name, value in (("READ_BYTES", 1 << 20), ("ROWS", 16), ("WIDTH", 64), ("LEAST_S", 0.0)):
        monkeypatch.setattr(roofline, name, value)


def report(tmp_path, folder, *flags):
    model = ["--model", str(folder), "--load-format", "dummy", "--threads", "1"]
    path = tmp_path / "out.json"
    assert main(["bench", *flags, *model, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_latency_has_a_row_for_each_batch_size(quick, tmp_path, folder, capsys):
    shape = ["--size", "64x64", "--text-tokens", "5", "--answer-tokens", "4", "--rounds", "1"]
    found = report(tmp_path, folder, "latency", "--batch", "1,3", *shape, "--page-size", "8")
    assert [(row["batch"], row["prompt"]) for row in found["rows"]] == [(1, 11), (3, 11)]
    assert all(row["TTFT max ms"] >= row["TTFT mean ms"] > 0 < row["ms/token"] for row in found["rows"])
    assert found["options"]["page_size"] == 8
    assert found["roofline"]["read GB/s"] > 0
    assert "this machine reads" in capsys.readouterr().out


def test_encoder_has_a_row_for_each_size_and_batch(quick, tmp_path, folder):
    found = report(tmp_path, folder, "encoder", "--sizes", "64x64,96x32", "--batch", "1,2", "--rounds", "1")
    assert [(r["picture"], r["batch"], r["vision tokens"]) for r in found["rows"]] == [
        ("64x64", 1, 4),
        ("64x64", 2, 8),
        ("96x32", 1, 3),
        ("96x32", 2, 6),
    ]
    assert all(row["tokens/s"] > 0 for row in found["rows"])


def test_throughput_counts_all_requests_and_their_tokens(quick, tmp_path, folder):
    shape = ["--size", "64x64", "--text-tokens", "5", "--answer-tokens", "4", "--rounds", "1"]
    flags = ["--requests", "5", "--workers", "0", "--kv-cache-mib", "8"]
    [row] = report(tmp_path, folder, "throughput", *shape, *flags)["rows"]
    assert row["output tok/s"] == pytest.approx(4 * row["requests/s"])
    assert (row["requests"], row["requests/s"]) == (5, pytest.approx(5 / row["wall s"]))
    assert row["steps"] >= 4


def test_requests_have_the_length_asked_for_and_share_nothing(bench):
    shape = Shape(text=7, pictures=2, size=(64, 64), answer=3)
    one, other = bench.request(shape, 1), bench.request(shape, 2)
    assert one.num_tokens == other.num_tokens == 7 + 2 * (4 + 2)
    assert one.sampling.max_tokens == 3
    assert len({item.digest for request in (one, other) for item in request.items}) == 4
    assert (bench.request(shape, 1).radix_keys == one.radix_keys).all()


def test_a_lap_tells_first_tokens_and_the_steps_in_which_all_decode(bench):
    requests = [bench.request(Shape(text=5, pictures=0, answer=6), seed) for seed in range(3)]
    done = lap(bench.engine(), requests)
    assert (len(done.first), done.generated, len(done.decodes)) == (3, 3, 5)


def test_a_request_that_fails_is_no_figure(bench, monkeypatch):
    engine = bench.engine()
    monkeypatch.setattr(engine.runner, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        lap(engine, [bench.request(Shape(pictures=0, answer=2), 1)])


def test_pictures_are_measured_at_the_nearest_size_that_can_be(bench):
    assert [grid_of(bench.model, size) for size in ((64, 32), (70, 1), (1000, 200))] == [
        (2, 4),
        (2, 4),
        (12, 62),
    ]


def test_rates_are_measured_for_every_form_that_can_run(quick):
    rates = roofline.measure(torch.device("cpu"), torch.bfloat16)
    assert {"plain"} <= rates.matrix.keys() <= set(roofline.linear_forms())
    assert rates.best == max(rates.matrix.values()) > 0
    assert {"plain", "onednn"} <= set(roofline.linear_forms())
    assert "auto" not in roofline.linear_forms()


def test_a_quantised_model_is_held_against_quantised_products_and_reads_fewer_bytes(quick, folder, bench):
    rates = roofline.measure(torch.device("cpu"), torch.bfloat16, "int8")
    [(name, rate)] = rates.quantized.items()
    assert "int8" in name
    assert rates.best == rate
    assert name in rates.told()
    options = {"model": str(folder), "load_format": "dummy", "dtype": "float32", "quantization": "int8"}
    assert 4 * Bench(Config.of(**options)).weight_bytes == bench.weight_bytes
