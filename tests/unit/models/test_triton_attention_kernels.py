"""The kernels of attention against plain torch: in Triton's interpreter, or on a GPU where one is."""

import pytest
import torch
from helpers.triton_device import DEVICE, EXACT

from mmserve.models.ops.triton import runtime

if reason := runtime.unusable(DEVICE):
    pytest.skip(f"Triton cannot run: {reason}", allow_module_level=True)

from mmserve.models.ops.triton import prefill_attention, varlen_attention
from mmserve.models.ops.triton.kv_store import store

NAN = float("nan")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 32), (3, 20), (8, 128)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_keys_and_values_are_stored_where_their_slots_say_and_nowhere_else(kv_heads, dim, kind):
    qkv = torch.randn(5, 4 + 2 * kv_heads, dim, device=DEVICE).bfloat16()
    _, k, v = qkv.split((4, kv_heads, kv_heads), 1)
    pool = torch.randn(2, kv_heads, 12, dim, device=DEVICE).bfloat16()
    wanted, slots = pool.clone(), [7, -1, 0, 11, -1]
    for row, slot in enumerate(slots):
        if slot >= 0:
            wanted[0, :, slot], wanted[1, :, slot] = k[row], v[row]
    store(k, v, pool[0], pool[1], ints(slots, kind))
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "dim"),
    [
        ([64] * 2 + [16, 4], 80),  # windows of Qwen2.5-VL, cut at a picture's edge
        ([70, 130], 72),
        ([1, 40], 64),
        ([33], 20),
        ([40], 256),
    ],
)
def test_segments_equal_a_plain_softmax(lengths, dim, dtype):
    rows, padding = sum(lengths), 3
    q, k, v = torch.randn(rows + padding, 6, dim, device=DEVICE).to(dtype).chunk(3, 1)
    for x in (q, k, v):
        x[rows:] = NAN
    stops = torch.tensor(lengths).cumsum(0).tolist()
    size = varlen_attention.tile_rows(max(lengths), dtype)
    tiles = varlen_attention.tiles_of(zip([0, *stops], stops, strict=False), size)
    nothing = ints([[0, 0, 0, 0]])
    out = torch.zeros(q.shape, dtype=dtype, device=DEVICE)
    varlen_attention.attend(q, k, v, torch.cat((ints(tiles.tolist()), nothing)), size, out)
    wanted = []
    for a, b, c in zip(*(x[:rows].double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) * dim**-0.5
        wanted.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    limit = EXACT if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[:rows].double(), torch.cat(wanted), rtol=0, atol=limit)
    assert not out[rows:].any()


@pytest.mark.parametrize(("past", "page_size"), [(0, 4), (5, 1), (70, 16)])
def test_a_tree_of_drafts_sees_its_branch(past, page_size):
    """Node i of a tree sees what was there before, its forebears and itself; against a softmax over those."""
    heads, kv_heads, dim, rows = 4, 2, 32, 3
    parents = [-1, 0, 0, 1, 2, 2, 3, -1, 7]
    new = len(parents)
    mask = torch.eye(new, dtype=torch.bool, device=DEVICE)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    pages = torch.randperm(30)[: -(-(past + new) // page_size)]
    slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[: past + new].to(DEVICE)
    keys, values = torch.full((2, kv_heads, 30 * page_size, dim), NAN, device=DEVICE)
    keys[:, slots], values[:, slots] = torch.randn(2, kv_heads, past + new, dim, device=DEVICE)
    tiles = ints([(at, min(rows, new - at), past + at, 1, past, past + new) for at in range(0, new, rows)])
    table = torch.stack((torch.zeros_like(pages), pages)).int().to(DEVICE)
    q = torch.randn(new, heads, dim, device=DEVICE)
    out = torch.empty_like(q)
    prefill_attention.prefill(q, keys, values, table, tiles, rows, page_size, out, mask)
    k, v = (side[:, slots].repeat_interleave(heads // kv_heads, 0) for side in (keys, values))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * dim**-0.5
    seen = torch.cat((torch.ones(new, past, dtype=torch.bool, device=DEVICE), mask), 1)
    wanted = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=EXACT)
