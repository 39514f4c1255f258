import random

import pytest
import torch

from mmserve.engine.attention.base import Span
from mmserve.engine.attention.matmul import MatmulAttention
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool, KVShape

TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
}  # bf16: scores and weights have 8 bits, values reach 4


def pools(shape, total_pages, page_size):
    """Two pools with the same finite leftovers in every slot, and the allocator of the first."""
    first, second = (KVPool(shape, total_pages, page_size, "cpu") for _ in range(2))
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
@pytest.mark.parametrize("heads", [(6, 6), (16, 8)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("scattered", [False, True])
def test_mixed_ragged_batches_agree_with_the_reference(dtype, heads, page_size, scattered):
    rng = random.Random(f"{dtype}{heads}{page_size}{scattered}")
    torch.manual_seed(0)
    shape = KVShape(layers=2, kv_heads=heads[1], head_dim=32, dtype=dtype)
    for _ in range(2):
        fast_pool, slow_pool = pools(shape, 1400 // page_size + 2, page_size)
        fast, slow = MatmulAttention(fast_pool), ReferenceAttention(slow_pool)
        news = [rng.choice([1, 1, 1, 2, 17, 150]) for _ in range(rng.randint(1, 6))]
        pasts = [rng.choice([0, 5, 63, 64, 200]) for _ in news]
        owned = tables(
            rng, fast_pool.allocator, page_size, [a + b for a, b in zip(news, pasts, strict=True)], scattered
        )
        spans, row = [], 0
        for new, past, table in zip(news, pasts, owned, strict=True):
            spans.append(Span(row, past, past + new, table))
            row += new
        q = torch.randn(row, heads[0], 32).to(dtype)
        k, v = (torch.randn(row, heads[1], 32).to(dtype) for _ in range(2))
        for backend in (fast, slow):
            backend.plan(spans, row)
        for layer in range(2):
            ours, theirs = fast.forward(q, k, v, layer), slow.forward(q, k, v, layer)
            assert (ours.float() - theirs.float()).abs().max() <= TOLERANCE[dtype]
        assert torch.equal(fast_pool.data, slow_pool.data)


def test_padding_rows_touch_no_page_and_read_zero():
    shape = KVShape(layers=1, kv_heads=2, head_dim=8, dtype=torch.float32)
    pool, before = pools(shape, 8, 4)
    table = PageTable(4)
    table.extend(pool.allocator.allocate(2))
    backend = MatmulAttention(pool)
    backend.plan([Span(0, 5, 6, table)], 4)
    out = backend.forward(torch.randn(4, 4, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8), 0)
    assert not out[1:].any()
    assert out[0].any()
    changed = (pool.data != before.data).any(dim=(0, 1, 2, 4)).nonzero().flatten()
    assert changed.tolist() == [table.slots(5, 6)[0]]


def test_a_context_at_the_very_end_of_the_pool():
    shape = KVShape(layers=1, kv_heads=1, head_dim=8, dtype=torch.float32)
    fast_pool, slow_pool = pools(shape, 5, 4)
    table = PageTable(4)
    table.extend([(3, 5)])
    q, k, v = (torch.randn(1, 1, 8) for _ in range(3))
    outs = []
    for backend in (MatmulAttention(fast_pool), ReferenceAttention(slow_pool)):
        backend.plan([Span(0, 7, 8, table)], 1)
        outs.append(backend.forward(q, k, v, 0))
    assert torch.allclose(*outs, atol=1e-6)
