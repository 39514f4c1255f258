"""Attention of prompts, in chunks of any length, over the paged KV pool.

One program has a tile: some neighbouring rows of one request, and all query heads that share a key-value
head, so that a block of keys is read once for all of them.
"""

import math

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.parts import dot, loaded, quotient, rounded, slots_of, softmax_step
from mmserve.models.ops.triton.runtime import Example

# Of a tile: its first row of q and out, how many rows (0: none), the place of the first in its context, lane
# of the table (-1: out is 0), and where the new tokens of its request begin and end in the context.
FIELDS = 6


@triton.jit
def _block(
    asked,
    top,
    total,
    acc,
    keys,
    values,
    mask,
    pages,
    base,
    at,
    past,
    stop,
    position,
    live,
    scale,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    EDGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attention goes on by tokens [at, at + BLOCK_N). Without EDGE every row sees all of them."""
    ALL: tl.constexpr = not EDGE and asked.shape[1] == DIM
    column = tl.arange(0, asked.shape[1]) < DIM
    token = at + tl.arange(0, BLOCK_N)
    there = token < stop
    place = base + slots_of(pages, token, there, not EDGE, PAGE)[:, None] * DIM
    seen = there[:, None] & column[None, :]
    k = loaded(keys + place, seen, ALL)
    scores = dot(asked, tl.trans(k), tl.zeros([asked.shape[0], BLOCK_N], tl.float32)) * scale
    if EDGE:
        if MASKED:
            new = (token >= past) & there
            told = tl.load(mask + (token - past)[None, :], live[:, None] & new[None, :], other=0)
            visible = (token < past)[None, :] | (told != 0)
        else:
            visible = token[None, :] <= position[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    weights, shrink, top, total = softmax_step(scores, top, total)
    v = loaded(values + place, seen, ALL)
    acc = dot(rounded(weights, v.dtype), v, acc * shrink[:, None])
    return top, total, acc


@triton.jit
def prefill_kernel(
    q,
    keys,
    values,
    table,
    tiles,
    mask,
    out,
    q_row,
    q_head,
    pool_head: tl.int64,
    table_lane: tl.int64,
    mask_row,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program (tile, kv_head). Element m of its BLOCK_M is row m // GROUP and query head m % GROUP."""
    tile, kv_head = tiles + tl.program_id(0) * 6, tl.program_id(1)
    rows = tl.load(tile + 1)
    if rows > 0:
        row = tl.load(tile).to(tl.int64)
        start, lane = tl.load(tile + 2), tl.load(tile + 3)
        past, stop = tl.load(tile + 4), tl.load(tile + 5)
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        mine, head = row + m // GROUP, kv_head * GROUP + m % GROUP
        live = m < rows * GROUP
        inside = live[:, None] & (d < DIM)[None, :]
        asked = tl.load(q + mine[:, None] * q_row + head[:, None] * q_head + d[None, :], inside, other=0.0)
        if MASKED:
            open_to_all = past
        else:
            open_to_all = start + 1
            stop = start + rows
        if lane < 0:
            stop = 0
        whole = tl.minimum(open_to_all, stop) // BLOCK_N * BLOCK_N

        pages = table + lane * table_lane
        base = kv_head * pool_head + d[None, :]
        chosen = mask + mine[:, None] * mask_row
        position = start + m // GROUP
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for at in range(0, whole, BLOCK_N):
            top, total, acc = _block(
                asked,
                top,
                total,
                acc,
                keys,
                values,
                chosen,
                pages,
                base,
                at,
                past,
                stop,
                position,
                live,
                scale,
                DIM,
                BLOCK_N,
                PAGE,
                False,
                MASKED,
            )
        for at in range(whole, stop, BLOCK_N):
            top, total, acc = _block(
                asked,
                top,
                total,
                acc,
                keys,
                values,
                chosen,
                pages,
                base,
                at,
                past,
                stop,
                position,
                live,
                scale,
                DIM,
                BLOCK_N,
                PAGE,
                True,
                MASKED,
            )
        found = quotient(acc, total)
        heads = tl.num_programs(1) * GROUP
        place = out + (mine[:, None] * heads + head[:, None]) * DIM + d[None, :]
        tl.store(place, rounded(found, out.dtype.element_ty), inside)


def tile_rows(num_rows: int, group: int, dim: int, dtype: torch.dtype) -> int:
    """Rows of one tile for a step of ``num_rows``, where ``group`` query heads share a key-value head."""
    return max(_block_m(num_rows, group, dim, dtype) // group, 1)


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    tiles: torch.Tensor,
    rows: int,
    page_size: int,
    out: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Rows of ``out`` [T, heads, dim], contiguous, become softmax(q k^T / sqrt(dim)) v, causally.

    ``q`` [T, heads, dim], heads may be strided; ``keys, values`` [kv_heads, slots, dim]; ``table`` int32
    [lanes, pages], page numbers in order; ``tiles`` int32 [n, FIELDS], of at most ``rows`` rows each. Pages
    beyond a context are not read.

    ``mask`` bool [T, new], for trees of drafts: a row sees all that was there before its request's new
    tokens, and of these those that its row of the mask tells.
    """
    heads, dim = q.shape[1:]
    kv_heads, count = keys.shape[0], tiles.shape[0]
    group = heads // kv_heads
    assert out.is_contiguous()
    assert q.stride(2) == 1
    assert keys.stride() == values.stride()
    assert keys.stride(1) == dim
    assert mask is None or mask.stride(1) == 1
    if not count:
        return
    block_d = max(16, triton.next_power_of_2(dim))
    block_m = max(16, triton.next_power_of_2(rows * group))
    block_n, options = _options(q.dtype, block_d, block_m)
    prefill_kernel[count, kv_heads](
        *(q, keys, values, table, tiles, tiles if mask is None else mask.view(torch.uint8), out),
        *(q.stride(0), q.stride(1), keys.stride(0), table.stride(0), 0 if mask is None else mask.stride(0)),
        dim**-0.5 * math.log2(math.e),
        GROUP=group,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PAGE=page_size,
        MASKED=mask is not None,
        **options,
    )


def _block_m(num_rows: int, group: int, dim: int, dtype: torch.dtype) -> int:
    most = 32 if dtype == torch.float32 else 128 if dim <= 128 else 64
    return min(most, max(16, triton.next_power_of_2(num_rows * group)))


def _options(dtype: torch.dtype, block_d: int, block_m: int) -> tuple[int, dict[str, int]]:
    """Tokens of a block of keys, and what else a launch is told.

    A block is asked for when its pages are known, which takes two stages of the pipeline; of five there are
    two blocks under way. float32 operands are in shared memory in three parts, which leaves no room for that.
    """
    if dtype == torch.float32:
        return (32 if block_d <= 128 else 16), {"num_warps": 4, "num_stages": 1}
    warps = 8 if block_m >= 128 and block_d >= 128 else 4
    return (64 if block_d <= 128 else 32), {"num_warps": warps, "num_stages": 5}


def _example(dtype: torch.dtype, group: int, dim: int, page: int, masked: bool) -> Example:
    kind = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types = dict.fromkeys(("q", "keys", "values", "out"), kind) | {"scale": "fp32"}
    types |= {"table": "*i32", "tiles": "*i32", "mask": "*u8" if masked else "*i32"}
    types |= {"q_row": "i32", "q_head": "i32", "mask_row": "i32", "pool_head": "i64", "table_lane": "i64"}
    block_m = _block_m(1024, group, dim, dtype)
    block_n, options = _options(dtype, dim, block_m)
    values = {"GROUP": group, "DIM": dim, "BLOCK_D": dim, "BLOCK_M": block_m, "BLOCK_N": block_n}
    values |= {"PAGE": page, "MASKED": masked}
    return Example(prefill_kernel, types, values, ("q_row", "q_head", "pool_head"), options)


EXAMPLES = [
    _example(torch.bfloat16, 2, 128, 16, False),
    _example(torch.bfloat16, 7, 128, 16, True),
    _example(torch.bfloat16, 4, 64, 16, False),
    _example(torch.bfloat16, 1, 256, 1, False),
    _example(torch.float32, 2, 32, 16, True),
    _example(torch.float32, 2, 256, 16, False),
]
