"""What FlashInfer is told, and what becomes of its answers; it is played by helpers/fake_flashinfer.py.

The library itself runs in tests/gpu alone; where it is installed, all calls are bound to its signatures.
"""

import inspect
import random

import numpy as np
import pytest
import torch
from helpers import fake_flashinfer
from helpers.engine_requests import drain, make_engine, prepared, tokens

from mmserve.engine.attention import flashinfer
from mmserve.engine.attention.base import Extent, Span
from mmserve.engine.attention.flashinfer import FlashInferAttention
from mmserve.engine.attention.page_lists import Contexts, PageLists, shared_pages
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool, KVShape
from mmserve.engine.runner.runner import Runner
from mmserve.models.ops import flashinfer as ops

HEADS, KV_HEADS, DIM = 4, 2, 64
SHAPE = KVShape(layers=2, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16)
EXTENT = Extent(heads=HEADS, max_decodes=16, max_len=512)


class World:
    """Two equal pools, one of FlashInferAttention and one of the reference, and requests in them."""

    def __init__(self, page_size, package=fake_flashinfer):
        torch.manual_seed(0)
        self.page_size, pages = page_size, 500 + 5000 // page_size
        self.pool, self.other = (KVPool(SHAPE, pages, page_size, "cpu") for _ in range(2))
        self.pool.data[:, :, :, page_size:].normal_()  # all but the dummy page
        self.other.data.copy_(self.pool.data)
        self.fast = FlashInferAttention(self.pool, EXTENT, package)
        self.slow = ReferenceAttention(self.other)

    def table(self, tokens, begin=None):
        """Pages for ``tokens`` in many runs, the first of them those of ``begin``."""
        table = PageTable(self.page_size)
        if begin is not None:
            table.extend(begin)
        while (missing := table.pages_missing(tokens)) > 0:
            table.extend(self.pool.allocator.allocate(min(missing, random.randint(1, 3))))
            self.pool.allocator.allocate(1)
        return table

    def step(self, spans, num_rows):
        """Both answer, layer after layer; what FlashInferAttention said, of the first layer."""
        qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, DIM).bfloat16()
        for attention in (self.fast, self.slow):
            attention.plan(spans, num_rows)
        return self.compare(qkv.split((HEADS, KV_HEADS, KV_HEADS), 1))

    def compare(self, qkv):
        first = None
        for layer in range(SHAPE.layers):
            ours, theirs = (a.forward(*qkv, layer) for a in (self.fast, self.slow))
            assert (ours.float() - theirs.float()).abs().max() < 3e-2
            first = ours if first is None else first
        assert torch.equal(self.pool.data, self.other.data)
        return first


def spans_of(world, news, pasts):
    spans, row = [], 0
    for new, past in zip(news, pasts, strict=True):
        spans.append(Span(row, past, past + new, world.table(past + new + random.randint(0, 40))))
        row += new
    return spans, row


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch):
    monkeypatch.setattr(ops, "FLOAT_WORKSPACE", 1 << 10)
    monkeypatch.setattr(ops, "INT_WORKSPACE", 1 << 10)


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def world(request):
    random.seed(0)
    return World(request.param)


def test_steps_of_decodes_agree_with_the_reference_and_padding_reads_zero(world):
    for pasts in ([0], [15, 16, 17, 200, 63], [5, 300, 31]):
        spans, row = spans_of(world, [1] * len(pasts), pasts)
        out = world.step(spans, 8)
        assert world.fast.form == "plain"
        assert out[:row].any(dim=-1).all()
        assert not out[row:].any()


def test_prompts_beside_decodes_agree_with_the_reference(world):
    for news, pasts in (([1, 1, 40, 17], [20, 130, 0, 16]), ([33], [0]), ([20, 1, 1], [7, 3, 40])):
        spans, row = spans_of(world, news, pasts)
        out = world.step(spans, row + 5)
        assert not out[row:].any()


def test_prompts_of_one_token_are_decodes_wherever_they_fit(world):
    spans, row = spans_of(world, [1] * 20, [30] * 20)
    assert row > EXTENT.max_decodes
    world.step(spans, 32)
    world.step(spans[:3], 16)


def test_a_plan_is_read_from_buffers_that_stay(world):
    """As a graph reads it: the forward that was captured under the first plan answers under the second."""
    spans, _ = spans_of(world, [1, 1, 1], [100, 7, 40])
    world.step(spans, 4)
    fast = world.fast
    captured, slots = fast._calls, fast.kv_slots(0)[2]
    [call] = captured
    addresses = [t.data_ptr() for t in (slots, call.planner._wrapper.ends, call.planner._wrapper.pages)]
    others, _ = spans_of(world, [1, 1], [250, 63])
    for attention in (fast, world.slow):
        attention.plan(others, 4)
    fast._calls, fast._slots = captured, slots
    world.compare(torch.randn(4, HEADS + 2 * KV_HEADS, DIM).bfloat16().split((HEADS, KV_HEADS, KV_HEADS), 1))
    wrapper = fast._calls[0].planner._wrapper
    assert [t.data_ptr() for t in (fast.kv_slots(0)[2], wrapper.ends, wrapper.pages)] == addresses


def test_a_step_of_nothing_but_padding_is_what_graphs_are_captured_under(world):
    assert not world.step([], 4).any()
    assert world.fast.kv_slots(0)[2].tolist() == [-1] * 4


def test_storing_and_attending_apart_is_the_same_as_a_forward(world):
    spans, _ = spans_of(world, [1, 1], [40, 9])
    q, k, v = torch.randn(2, HEADS + 2 * KV_HEADS, DIM).bfloat16().split((HEADS, KV_HEADS, KV_HEADS), 1)
    world.fast.plan(spans, 2)
    keys, values, slots = world.fast.kv_slots(1)
    assert slots.dtype == torch.int32
    keys[:, slots], values[:, slots] = k.transpose(0, 1), v.transpose(0, 1)
    apart = world.fast.attend(q, 1)
    assert torch.equal(apart, world.fast.forward(q, k, v, 1))


def test_a_common_prefix_is_read_once_where_that_spares_enough(world, monkeypatch):
    monkeypatch.setattr(flashinfer, "CASCADE_SPARED", 64 * 7)
    prefix = world.table(64).runs
    spans = [Span(i, 70 + i, 71 + i, world.table(110, begin=prefix)) for i in range(8)]
    world.step(spans, 16)
    assert world.fast.form == "cascade"
    world.step(spans, 8)
    assert world.fast.form == "cascade"
    world.step(spans[:7], 8)  # too few rows
    assert world.fast.form == "plain"
    monkeypatch.setattr(flashinfer, "CASCADE_SPARED", 10**9)
    world.step(spans, 16)
    assert world.fast.form == "plain"


def test_a_prefix_common_to_most_is_not_common_to_all(world, monkeypatch):
    monkeypatch.setattr(flashinfer, "CASCADE_SPARED", 1)
    prefix = world.table(64).runs
    spans = [Span(i, 70, 71, world.table(110, begin=prefix)) for i in range(7)]
    world.step([*spans, Span(7, 70, 71, world.table(110))], 8)
    assert world.fast.form == "plain"


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_an_engine_answers_as_by_other_backends(pair, monkeypatch, overlap):
    """Prompts in chunks beside decodes, common prefixes, one after another through the same planners."""
    monkeypatch.setattr(flashinfer, "CASCADE_SPARED", 1)
    cases = [(9,), (5, ("image", 4, 6), 7), (40,), (5, ("image", 4, 6), 9)]
    prompts = [pair.prompt(*case, seed=1) for case in cases] * 3
    said = []
    for changed in (False, True):
        engine = make_engine(pair, overlap=overlap, enforce_eager=True, step_tokens=24, page_size=4)
        if changed:
            extent = Extent(pair.model.config.text.num_heads, 64, engine.max_model_len)
            attention = FlashInferAttention(engine.kv, extent, fake_flashinfer)
            engine.runner = Runner(pair.model.language, attention, engine.claims, engine.device, 64)
        for number, prompt in enumerate(prompts):
            engine.submit(prepared(pair, prompt, str(number)))
        said.append({name: tokens(outputs) for name, outputs in drain(engine).items()})
    assert said[0] == said[1]


def test_rows_of_padding_stand_behind_all_others(world):
    with pytest.raises(ValueError, match="padding"):
        world.fast.plan([Span(2, 5, 6, world.table(6))], 4)


def test_tables_that_changed_are_read_anew_and_those_gone_are_forgotten():
    lists, table = PageLists(4), PageTable(4)
    table.extend([(3, 5)])
    span = Span(0, 6, 7, table)
    lists.keep([span])
    assert lists.contexts([span]).flat().tolist() == [3, 4]
    table.replace(1, [(9, 10)])
    lists.keep([span])
    assert lists.contexts([span]).flat().tolist() == [9, 4]
    assert lists.newest_slots([span], 2).tolist() == [4 * 4 + 2, -1]
    lists.keep([])
    assert not lists._known


def test_contexts_as_flat_arrays():
    found = Contexts([np.array(p, np.int32) for p in ([1, 2], [3], [4, 5, 6])], np.array([8, 1, 9]), 4)
    assert found.ends.tolist() == [0, 2, 3, 6]
    assert found.last.tolist() == [4, 1, 1]
    assert found.padded(5).ends.tolist() == [0, 2, 3, 6, 7, 8]
    common, own = Contexts(
        [np.array(p, np.int32) for p in ([1, 2], [1, 7], [0])], np.array([7, 6, 1]), 4
    ).split(1, 2)
    assert (common.flat().tolist(), common.last.tolist()) == ([1, 0], [4, 1])
    assert (own.flat().tolist(), own.last.tolist()) == ([2, 7, 0], [3, 2, 1])


@pytest.mark.parametrize(
    ("runs", "pages"),
    [
        (([(1, 5)], [(1, 5)]), 3),  # the newest token's page is nobody's to share
        (([(1, 4), (9, 12)], [(1, 4), (9, 11), (20, 22)]), 5),
        (([(1, 3), (7, 20)], [(2, 3), (7, 20)]), 0),
        (([(1, 3), (7, 20)], [(1, 9)]), 2),
    ],
)
def test_shared_pages_are_those_at_the_beginning(runs, pages):
    tables = []
    for some in runs:
        table = PageTable(4)
        table.extend(some)
        tables.append(Span(0, table.capacity - 1, table.capacity, table))
    assert shared_pages(tables, 4) == pages


def test_segments_of_a_packed_batch():
    torch.manual_seed(0)
    attend = ops.RaggedAttention(torch.device("cpu"), fake_flashinfer)
    for lengths in ((5, 3, 9), (17,), (5, 3, 9), (1, 2), (3, 1), (2, 2), (4,), (5, 3, 9)):
        q, k, v = torch.randn(3, sum(lengths), 4, 64)
        out, row = attend(q, k, v, lengths), 0
        for length in lengths:
            rows = slice(row, row + length)
            x, y, z = (t[rows].transpose(0, 1) for t in (q, k, v))
            wanted = torch.nn.functional.scaled_dot_product_attention(x, y, z)
            assert torch.allclose(out[rows].transpose(0, 1), wanted, atol=1e-5)
            row += length
    assert len(attend._plans) == attend.KEPT


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "said"),
    [
        ("cpu", torch.bfloat16, 64, "NVIDIA"),
        ("cuda", torch.float32, 64, "float32"),
        ("cuda", torch.bfloat16, 72, "heads of 64, 128, 256, not of 72"),
    ],
)
def test_where_it_cannot_run_it_is_told_why(device, dtype, dim, said):
    assert said in ops.unusable(torch.device(device), dtype, dim)


def test_what_is_missing_is_named(monkeypatch):
    ops._missing.cache_clear()
    monkeypatch.setattr(ops.importlib, "import_module", lambda name: 1 / 0 if name is None else _raise(name))
    assert "pip install 'mmserve[gpu]'" in ops.unusable(torch.device("cuda"), torch.bfloat16, 64)
    ops._missing.cache_clear()
    monkeypatch.setattr(ops.importlib, "import_module", lambda name: fake_flashinfer)
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ops.shutil, "which", lambda name, path=None: None)
    assert "no nvcc and no ninja" in ops.unusable(torch.device("cuda"), torch.bfloat16, 64)
    ops._missing.cache_clear()


def _raise(name):
    raise ImportError(f"No module named {name!r}")


@pytest.fixture
def real():
    return pytest.importorskip(
        "flashinfer",
        reason="FlashInfer's signatures are not checked: pip install --no-deps flashinfer-python"
        " apache-tvm-ffi requests urllib3 charset-normalizer nvidia-ml-py",
    )


def test_all_calls_fit_the_installed_library(real, monkeypatch):
    with fake_flashinfer.noted() as calls:
        everything_once(monkeypatch)
    assert len({(kind, name) for kind, name, _, _ in calls}) == 16, "four classes, each with four methods"
    for kind, name, args, kwargs in calls:
        # the decode wrapper's plan passes keywords on, unseen in its own signature
        inner = "_plan_impl" if (kind, name) == ("BatchDecodeWithPagedKVCacheWrapper", "plan") else name
        inspect.signature(getattr(getattr(real, kind), inner)).bind(None, *args, **kwargs)


def test_the_installed_librarys_own_code_takes_what_it_is_told(real, monkeypatch):
    """Its Python up to its kernels, in whose place stands what does nothing: it checks dtypes and shapes, and
    that what is planned for a graph fits the buffers."""
    called = []

    class Kernels:
        def __getattr__(self, name):
            return lambda *args: called.append(name) or [0] * 20

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **kwargs: empty(*size, **kwargs))
    monkeypatch.setattr(real.cascade, "merge_state_in_place", lambda *args: None)
    instead = {
        **dict.fromkeys(("get_batch_decode_module", "get_batch_prefill_module"), lambda *args: Kernels()),
        "determine_attention_backend": lambda *args, **kwargs: "fa2",
        "get_compute_capability": lambda device: (9, 0),
        "device_support_pdl": lambda device: False,
        "_get_cache_alibi_slopes_buf": lambda heads, device: None,
    }
    for module in (real.decode, real.prefill, real.utils):
        for name, stub in instead.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stub)
    monkeypatch.setattr(World, "compare", lambda self, qkv: self.fast.forward(*qkv, 0))
    everything_once(monkeypatch, real)
    assert {name: called.count(name) for name in ("run", "paged_run", "ragged_run")} == {
        "run": 2,
        "paged_run": 3,
        "ragged_run": 1,
    }


def everything_once(monkeypatch, package=fake_flashinfer):
    random.seed(0)
    world = World(16, package)
    spans, row = spans_of(world, [1, 1, 20], [20, 130, 16])
    world.step(spans, row)
    world.step(spans[:2], 8)
    monkeypatch.setattr(flashinfer, "CASCADE_SPARED", 1)
    prefix = world.table(64).runs
    world.step([Span(i, 70, 71, world.table(90, begin=prefix)) for i in range(8)], 8)
    q = torch.randn(5, 2, 64)
    ops.RaggedAttention(torch.device("cpu"), package)(q, q, q, (2, 3))
