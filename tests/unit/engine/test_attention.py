"""Every attention backend against the plain one, which is the oracle."""

import random
from itertools import pairwise

import pytest
import torch
from helpers.triton_device import DEVICE, EXACT

from mmserve.backends import expected
from mmserve.core.config import Config
from mmserve.core.errors import ConfigError
from mmserve.encoders import attention as vision
from mmserve.engine.attention import choose
from mmserve.engine.attention.base import Extent, Span
from mmserve.engine.attention.choose import attention_for, choose_attention
from mmserve.engine.attention.matmul import MatmulAttention
from mmserve.engine.attention.native import NativeAttention
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool, KVShape
from mmserve.models.ops.native import attention as native
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.triton import runtime

CPU = torch.device("cpu")
EXTENT = Extent(heads=2, max_decodes=2, max_len=8)
TOLERANCE = {
    torch.float32: EXACT,
    torch.bfloat16: 3e-2,
}  # bf16: scores and weights have 8 bits, values reach 4


@pytest.fixture
def native_backend():
    if reason := native.unusable(CPU, torch.bfloat16):
        pytest.skip(reason)
    return lambda pool, heads: NativeAttention(pool)


@pytest.fixture
def triton_backend():
    if reason := runtime.unusable(DEVICE):
        pytest.skip(reason)
    from mmserve.engine.attention.triton import TritonAttention

    return lambda pool, heads: TritonAttention(pool, Extent(heads, max_decodes=8, max_len=512))


@pytest.fixture
def torch_backend():
    return lambda pool, heads: MatmulAttention(pool)


@pytest.fixture(params=["torch", "native", "triton"])
def backend(request):
    """The fast backends, each made from a pool on a CPU and the number of query heads."""
    if request.param == "triton" and not runtime.INTERPRETED:
        pytest.skip("Triton's kernels are not interpreted here")
    return request.getfixturevalue(f"{request.param}_backend")


@pytest.fixture(params=["torch", "native"])
def cpu_backend(request):
    return request.getfixturevalue(f"{request.param}_backend")


def pools(shape, total_pages, page_size, device="cpu"):
    """Two pools with the same finite leftovers in every slot."""
    first, second = (KVPool(shape, total_pages, page_size, device) for _ in range(2))
    first.data.normal_()
    second.data.copy_(first.data)
    return first, second


def tables(rng, allocator, page_size, lengths, scattered):
    """Page tables for ``lengths`` tokens; scattered ones have their pages in many runs."""
    made = []
    for length in lengths:
        table = PageTable(page_size)
        while (missing := table.pages_missing(length)) > 0:
            take = min(missing, rng.randint(1, 3)) if scattered else missing
            table.extend(allocator.allocate(take, None if scattered else table.last_page))
            if scattered:
                allocator.allocate(1)
        made.append(table)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim"), [((6, 6), 32), ((16, 8), 32), ((7, 1), 64), ((6, 2), 20), ((4, 2), 128)]
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("scattered", [False, True])
def test_mixed_ragged_batches_agree_with_the_reference(cpu_backend, dtype, heads, dim, page_size, scattered):
    assert_agreement(cpu_backend, dtype, heads, dim, page_size, scattered)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "page_size", "scattered"),
    [
        (torch.float32, (6, 6), 32, 16, True),
        (torch.bfloat16, (6, 2), 20, 1, False),
        (torch.float32, (7, 1), 64, 1, True),
        (torch.bfloat16, (7, 1), 64, 16, False),
        (torch.bfloat16, (16, 8), 32, 16, True),
        (torch.float32, (4, 2), 128, 4, False),
        (torch.bfloat16, (4, 1), 256, 3, True),
        (torch.bfloat16, (40, 2), 32, 16, False),
    ],
)
@pytest.mark.parametrize(
    ("news", "pasts"),
    [([1, 1, 1], [0, 63, 190]), ([1, 17, 1], [64, 63, 0]), ([33, 1, 40], [0, 130, 65])],
    ids=["decodes", "small", "mixed"],
)
def test_triton_agrees_with_the_reference_and_reads_no_other_slot(
    triton_backend, dtype, heads, dim, page_size, scattered, news, pasts
):
    """Smaller steps than of the others: an interpreted program takes milliseconds."""
    rng = random.Random(f"{dtype}{heads}{page_size}{scattered}")
    assert_step_agrees(
        *(triton_backend, rng, dtype, heads, dim, page_size, scattered, news, pasts),
        elsewhere=float("nan"),
        device=DEVICE,
    )


def assert_agreement(backend, dtype, heads, dim, page_size, scattered):
    rng = random.Random(f"{dtype}{heads}{page_size}{scattered}")
    for _ in range(2):
        news = [rng.choice([1, 1, 1, 2, 17, 150]) for _ in range(rng.randint(1, 6))]
        pasts = [rng.choice([0, 5, 63, 64, 200]) for _ in news]
        assert_step_agrees(backend, rng, dtype, heads, dim, page_size, scattered, news, pasts)


def assert_step_agrees(
    backend,
    rng,
    dtype,
    heads,
    dim,
    page_size,
    scattered,
    news,
    pasts,
    elsewhere=None,
    device=CPU,
):
    """A step of requests with ``news`` new tokens behind ``pasts``; ``elsewhere`` fills all other slots."""
    torch.manual_seed(0)
    shape = KVShape(layers=2, kv_heads=heads[1], head_dim=dim, dtype=dtype)
    stops = [new + past for new, past in zip(news, pasts, strict=True)]
    fast_pool, slow_pool = pools(shape, 2 * sum(stops) // page_size + 20, page_size, device)
    fast, slow = backend(fast_pool, heads[0]), ReferenceAttention(slow_pool)
    owned = tables(rng, fast_pool.allocator, page_size, stops, scattered)
    spans, row = [], 0
    for new, past, table in zip(news, pasts, owned, strict=True):
        spans.append(Span(row, past, past + new, table))
        row += new
    if elsewhere is not None:
        unused = torch.ones(fast_pool.data.shape[3], dtype=torch.bool)
        for past, table in zip(pasts, owned, strict=True):
            unused[table.slots(0, past) if past else []] = False
        fast_pool.data[:, :, :, unused] = elsewhere
        slow_pool.data.copy_(fast_pool.data)
    qkv = torch.randn(row, heads[0] + 2 * heads[1], dim).to(device, dtype)
    q, k, v = qkv.split((heads[0], heads[1], heads[1]), 1)
    fast.plan(spans, row)
    slow.plan(spans, row)
    for layer in range(2) if elsewhere is None else (1,):
        ours, theirs = fast.forward(q, k, v, layer), slow.forward(q, k, v, layer)
        assert (ours.float() - theirs.float()).abs().max() <= TOLERANCE[dtype]
    torch.testing.assert_close(fast_pool.data, slow_pool.data, rtol=0, atol=0, equal_nan=True)


def test_padding_rows_touch_no_page_and_read_zero(backend):
    shape = KVShape(layers=1, kv_heads=2, head_dim=8, dtype=torch.float32)
    pool, before = pools(shape, 8, 4)
    table = PageTable(4)
    table.extend(pool.allocator.allocate(2))
    attention = backend(pool, 4)
    attention.plan([Span(0, 5, 6, table)], 4)
    out = attention.forward(torch.randn(4, 4, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8), 0)
    assert not out[1:].any()
    assert out[0].any()
    changed = (pool.data != before.data).any(dim=(0, 1, 2, 4)).nonzero().flatten()
    assert changed.tolist() == [table.slots(5, 6)[0]]


def test_a_context_at_the_very_end_of_the_pool(backend):
    shape = KVShape(layers=1, kv_heads=1, head_dim=8, dtype=torch.float32)
    fast_pool, slow_pool = pools(shape, 5, 4)
    table = PageTable(4)
    table.extend([(3, 5)])
    q, k, v = (torch.randn(1, 1, 8) for _ in range(3))
    outs = []
    for attention in (backend(fast_pool, 1), ReferenceAttention(slow_pool)):
        attention.plan([Span(0, 7, 8, table)], 1)
        outs.append(attention.forward(q, k, v, 0))
    assert torch.allclose(*outs, atol=1e-6)


class Several:
    """Requests with a past, in a pool of their own, for NativeAttention in any company."""

    def __init__(self, dtype, page_size, scattered):
        torch.manual_seed(0)
        self.shape = KVShape(layers=1, kv_heads=2, head_dim=64, dtype=dtype)
        self.news, self.pasts = [1, 70, 1, 1, 33], [40, 100, 1300, 0, 0]
        self.pool = KVPool(self.shape, 4000 // page_size, page_size, "cpu")
        stops = [a + b for a, b in zip(self.news, self.pasts, strict=True)]
        self.tables = tables(random.Random(0), self.pool.allocator, page_size, stops, scattered)
        self.rows = [torch.randn(n, 4 + 2 + 2, 64).to(dtype) for n in self.news]
        for past, table in zip(self.pasts, self.tables, strict=True):
            for side in (self.pool.keys(0), self.pool.values(0)):
                if past:
                    side[:, torch.from_numpy(table.slots(0, past))] = torch.randn(2, past, 64).to(dtype)

    def answers(self, chosen, threads):
        """Of the requests ``chosen``, in one batch."""
        spans, row = [], 0
        for i in chosen:
            spans.append(Span(row, self.pasts[i], self.pasts[i] + self.news[i], self.tables[i]))
            row += self.news[i]
        attention = NativeAttention(self.pool)
        attention.plan(spans, row + 3)
        qkv = torch.cat([*(self.rows[i] for i in chosen), torch.randn(3, 8, 64).to(self.shape.dtype)])
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = attention.forward(*qkv.split((4, 2, 2), 1), 0)
        finally:
            torch.set_num_threads(before)
        return dict(zip(chosen, out[:row].split([self.news[i] for i in chosen]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_answers_do_not_depend_on_company_threads_or_pages(native_backend, dtype):
    if reason := native.left_to_torch(dtype):
        pytest.skip(f"prompts are left to torch: {reason}")
    first = Several(dtype, 16, scattered=False)
    together = first.answers(range(5), threads=2)
    for i in range(5):
        assert torch.equal(first.answers([i], threads=1)[i], together[i])
    other_pages = Several(dtype, 1, scattered=True).answers([4, 1, 0, 3, 2], threads=2)
    assert all(torch.equal(other_pages[i], together[i]) for i in range(5))


def test_native_prompts_in_chunks_are_bit_for_bit_those_in_one(native_backend):
    torch.manual_seed(0)
    shape = KVShape(layers=1, kv_heads=2, head_dim=32, dtype=torch.float32)
    qkv, outs = torch.randn(200, 8, 32), []
    for cuts in ([0, 200], [0, 90, 96, 130, 200]):
        pool = KVPool(shape, 20, 16, "cpu")
        table = PageTable(16)
        table.extend(pool.allocator.allocate(13))
        attention, parts = native_backend(pool, 4), []
        for start, stop in pairwise(cuts):
            attention.plan([Span(0, start, stop, table)], stop - start)
            parts.append(attention.forward(*qkv[start:stop].split((4, 2, 2), 1), 0))
        outs.append(torch.cat(parts))
    assert torch.equal(*outs)


def test_prompts_are_left_to_torch_where_the_cpu_multiplies_bf16(native_backend, monkeypatch):
    monkeypatch.setattr(native, "bf16_instructions", lambda: "avx512_bf16")
    monkeypatch.setattr("mmserve.engine.attention.native.FEW", 1)
    assert_agreement(native_backend, torch.bfloat16, (16, 8), 32, 16, True)


def test_auto_takes_native_where_it_runs_and_else_torch_and_says_why(monkeypatch, caplog):
    shape = KVShape(layers=1, kv_heads=1, head_dim=8, dtype=torch.bfloat16)
    pool = KVPool(shape, 2, 4, "cpu")
    if native.unusable(CPU, torch.bfloat16) is None:
        assert isinstance(attention_for("auto", pool, EXTENT), NativeAttention)
    assert isinstance(attention_for("torch", pool, EXTENT), MatmulAttention)

    def unavailable():
        raise NativeUnavailable("there is no compiler")

    monkeypatch.setattr(native, "kernels", unavailable)
    assert isinstance(attention_for("auto", pool, EXTENT), MatmulAttention)
    assert "there is no compiler" in caplog.text
    with pytest.raises(ConfigError, match="native cannot run: there is no compiler"):
        attention_for("native", pool, EXTENT)


def test_auto_on_a_gpu_takes_flashinfer_then_triton_then_torch_and_says_why(monkeypatch):
    reasons = {"flashinfer": None, "triton": None}
    monkeypatch.setattr(choose.flashinfer, "unusable", lambda *_: reasons["flashinfer"])
    monkeypatch.setattr(choose.triton, "unusable", lambda *_: reasons["triton"])
    here = "auto", torch.device("cuda"), torch.bfloat16
    assert choose_attention(*here)[0] == "flashinfer"
    reasons["flashinfer"] = "it is not installed"
    chosen, why = choose_attention(*here)
    assert chosen == "triton"
    assert "flashinfer cannot run: it is not installed" in why
    reasons["triton"] = "the GPU is too old"
    chosen, why = choose_attention(*here)
    assert chosen == "torch"
    assert "not installed" in why
    assert "too old" in why
    for name in reasons:
        with pytest.raises(ConfigError, match=f"attention_backend {name} cannot run: {reasons[name]}"):
            choose_attention(name, *here[1:])


def test_flashinfer_is_asked_about_the_models_own_heads(monkeypatch):
    asked = []
    monkeypatch.setattr(choose.flashinfer, "unusable", lambda *which: asked.append(which))
    choose_attention("flashinfer", torch.device("cuda"), torch.bfloat16, 48)
    assert asked == [(torch.device("cuda"), torch.bfloat16, 48)]


def test_doctor_tells_what_a_gpu_would_run_and_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(choose.flashinfer, "unusable", lambda *_: "it is not installed")
    monkeypatch.setattr(choose.triton, "unusable", lambda *_: None)
    vision.choose_form.cache_clear()
    told = expected(Config.of(device="cuda"))
    vision.choose_form.cache_clear()
    assert (told["attention"]["runs"], told["vision attention"]["runs"]) == ("triton", "triton")
    assert "flashinfer cannot run: it is not installed" in told["attention"]["why"]
    assert told["graphs"]["runs"] == "CUDA graphs"
    asked = expected(Config.of(device="cuda", attention_backend="torch"))
    assert asked["attention"] == {"runs": "torch", "why": "asked for"}
    assert asked["graphs"]["runs"] == "none"


@pytest.mark.skipif(runtime.unusable(CPU) is not None, reason="nothing is interpreted here")
def test_a_cpu_never_gets_an_interpreter_unasked():
    assert choose_attention("auto", CPU, torch.bfloat16)[0] != "triton"
    assert choose_attention("triton", CPU, torch.bfloat16)[0] == "triton"
    pool = KVPool(KVShape(1, 1, 16, torch.float32), 3, 4, "cpu")
    backend = attention_for("triton", pool, EXTENT)
    assert type(backend).__name__ == "TritonAttention"
    assert expected(Config.of(device="cpu", attention_backend="triton"))["graphs"]["runs"] == "none"
