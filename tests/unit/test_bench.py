"""The benchmarks run and say what they measured; how fast is nobody's test."""

import json

from mmserve.bench import preprocess, scheduler
from mmserve.bench.media import clip, photograph, still
from mmserve.bench.table import markdown, write_json
from mmserve.models.hub import resolve
from mmserve.preprocess.spec import ProcessorSpec


async def test_every_contender_is_measured_on_what_it_can_read(tmp_path):
    spec = preprocess.budgeted(ProcessorSpec.load(resolve("mmserve/tiny-vl")), 128 * 128)
    rows = await preprocess.measure(spec, (1,), 1, [still(96, 96, "PNG"), clip(64, 64, 1, rate=4)])
    picture, film = (preprocess.with_ratios(row, (1,)) for row in rows)
    assert picture["sample"] == "PNG 96x96"
    assert min(picture[name] for name in ("transformers", "this thread", "1 worker")) > 0
    assert picture["1 worker / transformers"] == picture["1 worker"] / picture["transformers"]
    assert film["transformers"] is None
    assert film["1 worker / transformers"] is None
    write_json(tmp_path / "out.json", {"rows": [picture, film]})
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0] == picture


def test_a_budget_replaces_the_models_own():
    spec = ProcessorSpec.load(resolve("mmserve/tiny-vl"))
    assert preprocess.budgeted(spec, 1 << 20).image.max_pixels == 1 << 20


def test_samples_have_detail_at_every_scale():
    """As photographs do, a JPEG of one takes about a quarter of a byte for each pixel."""
    assert 0.1 < len(still(256, 256, "JPEG").data) / 256**2 < 0.6
    assert photograph(40, 60).size == (60, 40)


def test_a_table_has_one_column_for_each_figure():
    text = markdown(
        [{"sample": "a", "speed": 1234.5, "ratio": None}, {"sample": "b", "speed": 2.0, "ratio": 0.5}]
    )
    assert text.splitlines()[2:] == ["| a | 1234 | – |", "| b | 2.00 | 0.50 |"]


def test_the_scheduler_is_measured_with_every_request_decoding():
    row = scheduler.measure(running=5, steps=3)
    assert row["running"] == 5
    assert row["step µs"] == row["schedule µs"] + row["advance µs"] + row["append µs"] > 0
