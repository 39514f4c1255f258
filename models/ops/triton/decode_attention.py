"""Attention of single new tokens over the paged KV pool, each context cut into splits that run side by side.

One program has one request, one key-value head with all query heads that share it, and one split. With more
than one split a second kernel adds up what they found (Flash-Decoding, Dao et al. 2023).
"""

import math

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.parts import dot, quotient, rounded, slots_of, softmax_step
from mmserve.models.ops.triton.runtime import Example

FIELDS = 3  # of a decode: row of q and out (-1: none), tokens of its context (0: out is 0), lane of the table
BLOCK_N = 64  # tokens that are read at once


@triton.jit
def decode_kernel(
    q,
    keys,
    values,
    table,
    decodes,
    out,
    parts,
    sums,
    q_row,
    q_head,
    pool_head: tl.int64,
    table_lane: tl.int64,
    scale,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (decode, kv_head, split). With SPLITS 1 it writes ``out``, else its ``parts`` [decodes, heads,
    SPLITS, DIM], normalised, and ``sums`` [decodes, heads, SPLITS], log2 of the sum of its weights."""
    entry, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(decodes + entry * 3).to(tl.int64)
    if row >= 0:
        length = tl.load(decodes + entry * 3 + 1)
        lane = tl.load(decodes + entry * 3 + 2)
        each = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
        first = split * each
        stop = tl.minimum(first + each, length)

        head = tl.arange(0, BLOCK_G)
        d = tl.arange(0, BLOCK_D)
        n = tl.arange(0, BLOCK_N)
        live = (head < GROUP)[:, None] & (d < DIM)[None, :]
        query = q + row * q_row + (kv_head * GROUP + head)[:, None] * q_head + d[None, :]
        asked = tl.load(query, live, other=0.0)
        pages = table + lane * table_lane
        base = kv_head * pool_head + d[None, :]

        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for at in range(first, stop, BLOCK_N):
            there = at + n < stop
            place = base + slots_of(pages, at + n, there, False, PAGE)[:, None] * DIM
            seen = there[:, None] & (d < DIM)[None, :]
            k = tl.load(keys + place, seen, other=0.0)
            scores = dot(asked, tl.trans(k), tl.zeros([BLOCK_G, BLOCK_N], tl.float32)) * scale
            scores = tl.where(there[None, :], scores, float("-inf"))
            weights, shrink, top, total = softmax_step(scores, top, total)
            v = tl.load(values + place, seen, other=0.0)
            acc = dot(rounded(weights, v.dtype), v, acc * shrink[:, None])

        found = quotient(acc, total)
        mine = kv_head * GROUP + head
        heads = tl.num_programs(1) * GROUP
        if SPLITS == 1:
            place = out + (row * heads + mine[:, None]) * DIM + d[None, :]
            tl.store(place, rounded(found, out.dtype.element_ty), live)
        else:
            part = (entry * heads + mine) * SPLITS + split
            tl.store(parts + part[:, None] * DIM + d[None, :], found, live & (first < stop))
            weight = top + tl.log2(tl.where(total == 0.0, 1.0, total))  # -inf of an empty split
            tl.store(sums + part, weight, head < GROUP)


@triton.jit
def combine_kernel(
    decodes,
    parts,
    sums,
    out,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (decode, head): ``out`` from what the splits found; 0 where none found anything."""
    entry, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(decodes + entry * 3).to(tl.int64)
    if row >= 0:
        heads = tl.num_programs(1)
        split = tl.arange(0, SPLITS)
        d = tl.arange(0, BLOCK_D)
        first = (entry * heads + head) * SPLITS
        share = tl.load(sums + first + split)
        top = tl.max(share, 0)
        weights = tl.exp2(share - tl.where(top == float("-inf"), 0.0, top))
        some = (share > float("-inf"))[:, None] & (d < DIM)[None, :]
        found = tl.load(parts + (first + split)[:, None] * DIM + d[None, :], some, other=0.0)
        total = tl.sum(weights, 0)
        mixed = tl.sum(found * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        tl.store(out + (row * heads + head) * DIM + d, rounded(mixed, out.dtype.element_ty), d < DIM)


def splits_for(decodes: int, kv_heads: int, tokens: int, processors: int) -> int:
    """Into how many splits, a power of two, each of ``decodes`` contexts of up to ``tokens`` is cut, so that
    there are about two programs for each of a GPU's ``processors``."""
    wanted = 2 * processors // (decodes * kv_heads)
    most = triton.cdiv(tokens, BLOCK_N)
    return 1 << max(min(wanted, most, 64), 1).bit_length() - 1


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    decodes: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
    parts: torch.Tensor,
    sums: torch.Tensor,
    splits: int,
) -> None:
    """Rows of ``out`` [T, heads, dim], contiguous, become softmax(q k^T / sqrt(dim)) v.

    ``q`` [T, heads, dim], heads may be strided; ``keys, values`` [kv_heads, slots, dim]; ``table`` int32
    [lanes, pages], page numbers in order; ``decodes`` int32 [n, 3]: row, tokens of the context, lane. A row
    of -1 is passed over, 0 tokens give 0. ``parts`` and ``sums``, float32 of at least n * heads * splits *
    dim and n * heads * splits, are scratch. Pages beyond a context are not read.
    """
    heads, dim = q.shape[1:]
    kv_heads, count = keys.shape[0], decodes.shape[0]
    block_d = max(16, triton.next_power_of_2(dim))
    group = heads // kv_heads
    assert out.is_contiguous()
    assert q.stride(2) == 1
    assert keys.stride() == values.stride()
    assert keys.stride(1) == dim
    if not count:
        return
    decode_kernel[count, kv_heads, splits](
        *(q, keys, values, table, decodes, out, parts, sums),
        *(q.stride(0), q.stride(1), keys.stride(0), table.stride(0), dim**-0.5 * math.log2(math.e)),
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_N=BLOCK_N,
        PAGE=page_size,
        SPLITS=splits,
        **_options(q.dtype, block_d),
    )
    if splits > 1:
        combine_kernel[count, heads](
            decodes, parts, sums, out, DIM=dim, BLOCK_D=block_d, SPLITS=splits, num_warps=4
        )


def _options(dtype: torch.dtype, block_d: int) -> dict[str, int]:
    """A block of keys is asked for when its pages are known, which takes two stages of the pipeline; of five
    there are two blocks under way. float32 would not fit into shared memory so."""
    if dtype == torch.float32:
        return {"num_warps": 4, "num_stages": 2 if block_d <= 128 else 1}
    return {"num_warps": 4, "num_stages": 5}


def _example(dtype: torch.dtype, group: int, dim: int, page: int, splits: int) -> Example:
    kind = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types = dict.fromkeys(("q", "keys", "values", "out"), kind) | {"scale": "fp32"}
    types |= dict.fromkeys(("table", "decodes"), "*i32") | dict.fromkeys(("parts", "sums"), "*fp32")
    types |= {"q_row": "i32", "q_head": "i32", "pool_head": "i64", "table_lane": "i64"}
    values = {"GROUP": group, "BLOCK_G": 16, "DIM": dim, "BLOCK_D": dim, "BLOCK_N": BLOCK_N}
    values |= {"PAGE": page, "SPLITS": splits}
    return Example(decode_kernel, types, values, ("q_row", "q_head", "pool_head"), _options(dtype, dim))


EXAMPLES = [
    _example(torch.bfloat16, 2, 128, 16, 1),
    _example(torch.bfloat16, 7, 128, 16, 32),
    _example(torch.bfloat16, 16, 256, 1, 4),
    _example(torch.float32, 1, 32, 16, 2),
    _example(torch.float32, 2, 256, 16, 8),
    Example(
        combine_kernel,
        {"decodes": "*i32", "parts": "*fp32", "sums": "*fp32", "out": "*bf16"},
        {"DIM": 128, "BLOCK_D": 128, "SPLITS": 32},
    ),
]
