"""Attention backends on the device against the reference there, eager and in graphs."""

import random

import pytest
import torch

from mmserve.engine.attention.base import Extent, Span
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool, KVShape
from mmserve.engine.runner.devices import EagerGraph, device_for
from mmserve.models.ops import flashinfer as ops
from mmserve.models.ops.triton import runtime

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
BACKENDS = ("triton", "flashinfer", "torch")
SHAPES = [  # query heads, kv heads, head_dim: of Qwen3-VL-2B, -8B, Qwen2.5-VL-7B, tiny-vl
    (16, 8, 128),
    (32, 8, 128),
    (28, 4, 128),
    (4, 2, 64),
]
LAYERS = 2


def backend_of(name, pool, extent):
    device, shape = pool.data.device, pool.shape
    if name == "flashinfer":
        if reason := ops.unusable(device, shape.dtype, shape.head_dim):
            pytest.skip(f"FlashInfer: {reason}")
        if shape.head_dim != 128:
            pytest.skip("FlashInfer compiles for minutes; one size of heads is tried")
        from mmserve.engine.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(pool, extent)
    if name == "triton":
        if reason := runtime.unusable(device):
            pytest.skip(f"Triton: {reason}")
        from mmserve.engine.attention.triton import TritonAttention

        return TritonAttention(pool, extent)
    from mmserve.engine.attention.matmul import MatmulAttention

    return MatmulAttention(pool)


class Pair:
    """A backend and the reference, over equal pools, and requests in them."""

    def __init__(self, name, device, dtype, shape, page_size, small):
        random.seed(0)
        torch.manual_seed(0)
        heads, kv_heads, dim = (shape[0], shape[1], min(shape[2], 64)) if small else shape
        self.device, self.dtype, self.heads, self.kv_heads, self.dim = device, dtype, heads, kv_heads, dim
        self.longest = 96 if small else 3000
        kv = KVShape(LAYERS, kv_heads, dim, dtype)
        pages = (12 if small else 24) * self.longest // page_size + 8
        self.pool, self.other = (KVPool(kv, pages, page_size, device) for _ in range(2))
        self.pool.data[:, :, :, page_size:].normal_()
        self.other.data.copy_(self.pool.data)
        self.fast = backend_of(name, self.pool, Extent(heads, 16, self.longest + 64))
        self.slow = ReferenceAttention(self.other)
        self.page_size = page_size

    def table(self, tokens, begin=()):
        table = PageTable(self.page_size)
        table.extend(list(begin))
        while (missing := table.pages_missing(tokens)) > 0:
            table.extend(self.pool.allocator.allocate(min(missing, random.randint(1, 40))))
        return table

    def spans(self, news, pasts):
        spans, row = [], 0
        for new, past in zip(news, pasts, strict=True):
            spans.append(Span(row, past, past + new, self.table(past + new)))
            row += new
        return spans, row

    def qkv(self, rows):
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return torch.randn(rows, sum(heads), self.dim, device=self.device).to(self.dtype).split(heads, 1)

    def step(self, spans, rows):
        for attention in (self.fast, self.slow):
            attention.plan(spans, rows)
        qkv = self.qkv(rows)
        for layer in range(LAYERS):
            ours, theirs = (a.forward(*qkv, layer) for a in (self.fast, self.slow))
            assert (ours.float() - theirs.float()).abs().max() < TOLERANCE[self.dtype]
        assert torch.equal(self.pool.data, self.other.data)

    def free(self, spans):
        for span in spans:
            self.pool.allocator.release(span.table.runs)


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def page_size(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=lambda s: f"{s[0]}/{s[1]}x{s[2]}")
def shape(request):
    return request.param


@pytest.fixture(params=BACKENDS)
def pair(request, device, shape, page_size):
    if request.param == "triton" and device.type == "cpu":
        pytest.skip("interpreted it takes minutes; tests/unit/engine/test_attention.py does that")
    return Pair(request.param, device, torch.bfloat16, shape, page_size, small=device.type == "cpu")


def test_steps_agree_with_the_reference(pair):
    few, some, many = pair.longest // 90, pair.longest // 8, pair.longest - 40
    for news, pasts in (
        ([1], [0]),
        ([1] * 11, [random.randint(0, many) for _ in range(11)]),
        ([1, 1, some], [many, few, 0]),
        ([some], [some]),
        ([1, few, some, 1], [some, 0, few, 3]),
    ):
        spans, rows = pair.spans(news, pasts)
        pair.step(spans, rows)
        pair.step(spans, max(16, -(-rows // 8) * 8))
        pair.free(spans)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_float32_is_exact_to_its_rounding(device, name, page_size):
    pair = Pair(name, device, torch.float32, (4, 2, 64), page_size, small=device.type == "cpu")
    spans, rows = pair.spans([1, 1, 20], [70, 3, 16])
    pair.step(spans, rows)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_captured_step_answers_under_later_plans(device, name, page_size):
    """The forward of one plan, captured, is replayed under others: longer contexts, fewer rows, new pages."""
    pair = Pair(name, device, torch.bfloat16, (16, 8, 128), page_size, small=device.type == "cpu")
    rows, place = 8, device_for(device)
    buffer = torch.zeros(rows, pair.heads + 2 * pair.kv_heads, pair.dim, dtype=pair.dtype, device=device)
    heads, out = (pair.heads, pair.kv_heads, pair.kv_heads), {}
    pair.fast.plan([], rows)

    def forward():
        out["rows"] = pair.fast.forward(*buffer.split(heads, 1), 0)

    graph = place.capture(forward) if pair.fast.capturable else EagerGraph(forward)
    for count in (8, 3, 8, 1) if device.type == "cuda" else (3, 1):
        spans, _ = pair.spans([1] * count, [random.randint(0, pair.longest - 40) for _ in range(count)])
        buffer.normal_()
        for attention in (pair.fast, pair.slow):
            attention.plan(spans, rows)
        graph.replay()
        theirs = pair.slow.forward(*buffer.split(heads, 1), 0)
        assert (out["rows"].float() - theirs.float()).abs().max() < TOLERANCE[pair.dtype]
        assert torch.equal(pair.pool.data, pair.other.data)
        pair.free(spans)


def test_flashinfer_reads_a_common_prefix_once(device, monkeypatch):
    from mmserve.engine.attention import flashinfer

    pair = Pair("flashinfer", device, torch.bfloat16, (32, 8, 128), 16, small=device.type == "cpu")
    monkeypatch.setattr(flashinfer, "CASCADE_SPARED", 1)
    shared = pair.table(1024).runs
    spans = [Span(i, 1100 + i, 1101 + i, pair.table(1200, begin=shared)) for i in range(12)]
    pair.step(spans, 16)
    assert pair.fast.form == "cascade"


def test_flashinfer_within_segments_of_pictures(device):
    if reason := ops.unusable(device, torch.bfloat16, 64):
        pytest.skip(f"FlashInfer: {reason}")
    lengths = (1024, 256, 4096)
    q, k, v = torch.randn(3, sum(lengths), 16, 128, device=device).bfloat16()
    out, row = ops.RaggedAttention(device)(q, k, v, lengths), 0
    for length in lengths:
        x, y, z = (t[row : row + length].transpose(0, 1).float() for t in (q, k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(x, y, z).transpose(0, 1)
        assert (out[row : row + length].float() - wanted).abs().max() < 3e-2
        row += length
