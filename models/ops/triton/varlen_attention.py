"""Attention within the segments of a packed batch, both ways: what vision transformers do."""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.parts import dot, loaded, quotient, rounded, softmax_step
from mmserve.models.ops.triton.runtime import Example

FIELDS = 4  # of a tile: its first row, how many rows (0: none), and the rows [first, stop) that they see


@triton.jit
def _block(
    asked,
    asked_rest,
    top,
    total,
    acc,
    acc_rest,
    k,
    v,
    at,
    stop,
    k_row,
    v_row,
    scale,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    REST: tl.constexpr,
):
    """Attention goes on by rows [at, at + BLOCK_N), up to ``stop`` if EDGE."""
    WIDE: tl.constexpr = asked.shape[1]
    d = tl.arange(0, WIDE)
    r = WIDE + tl.arange(0, asked_rest.shape[1])
    row = at + tl.arange(0, BLOCK_N)
    there = row < stop
    row = row.to(tl.int64)[:, None]
    seen = there[:, None] & (d < DIM)[None, :]
    seen_rest = there[:, None] & (r < DIM)[None, :]
    keys = loaded(k + row * k_row + d[None, :], seen, not EDGE and WIDE <= DIM)
    scores = dot(asked, tl.trans(keys), tl.zeros([asked.shape[0], BLOCK_N], tl.float32))
    if REST:
        keys_rest = tl.load(k + row * k_row + r[None, :], seen_rest, other=0.0)
        scores = dot(asked_rest, tl.trans(keys_rest), scores)
    scores *= scale
    if EDGE:
        scores = tl.where(there[None, :], scores, float("-inf"))
    weights, shrink, top, total = softmax_step(scores, top, total)
    values = loaded(v + row * v_row + d[None, :], seen, not EDGE and WIDE <= DIM)
    weights = rounded(weights, values.dtype)
    acc = dot(weights, values, acc * shrink[:, None])
    if REST:
        values_rest = tl.load(v + row * v_row + r[None, :], seen_rest, other=0.0)
        acc_rest = dot(weights, values_rest, acc_rest * shrink[:, None])
    return top, total, acc, acc_rest


@triton.jit
def varlen_kernel(
    q,
    k,
    v,
    tiles,
    out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,
    APART: tl.constexpr,
):
    """Program (tile, head). Heads whose size is no power of two (72 and 80) are multiplied in two pieces, the
    first BLOCK_D wide and REST of BLOCK_R, instead of as one of the next power. All strides are multiples of
    APART: where that is 8, 8 numbers are read at once."""
    tile, head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    rows = tl.load(tile + 1)
    if rows > 0:
        row = tl.load(tile).to(tl.int64)
        first, stop = tl.load(tile + 2), tl.load(tile + 3)
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        r = BLOCK_D + tl.arange(0, BLOCK_R)
        mine = (row + m)[:, None]
        inside = (m < rows)[:, None] & (d < DIM)[None, :]
        inside_rest = (m < rows)[:, None] & (r < DIM)[None, :]
        asked_at = q + tl.multiple_of(head * q_head, APART)
        keys_at = k + tl.multiple_of(head * k_head, APART)
        values_at = v + tl.multiple_of(head * v_head, APART)
        asked = tl.load(asked_at + mine * q_row + d[None, :], inside, other=0.0)
        asked_rest = tl.zeros([BLOCK_M, BLOCK_R], q.dtype.element_ty)
        if REST:
            asked_rest = tl.load(asked_at + mine * q_row + r[None, :], inside_rest, other=0.0)

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc_rest = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        whole = first + (stop - first) // BLOCK_N * BLOCK_N
        for at in range(first, whole, BLOCK_N):
            top, total, acc, acc_rest = _block(
                asked,
                asked_rest,
                top,
                total,
                acc,
                acc_rest,
                keys_at,
                values_at,
                at,
                stop,
                k_row,
                v_row,
                scale,
                DIM,
                BLOCK_N,
                False,
                REST,
            )
        if whole < stop:
            top, total, acc, acc_rest = _block(
                asked,
                asked_rest,
                top,
                total,
                acc,
                acc_rest,
                keys_at,
                values_at,
                whole,
                stop,
                k_row,
                v_row,
                scale,
                DIM,
                BLOCK_N,
                True,
                REST,
            )
        place = out + (mine * tl.num_programs(1) + head) * DIM
        tl.store(place + d[None, :], rounded(quotient(acc, total), out.dtype.element_ty), inside)
        if REST:
            tl.store(
                place + r[None, :], rounded(quotient(acc_rest, total), out.dtype.element_ty), inside_rest
            )


def tile_rows(longest: int, dtype: torch.dtype) -> int:
    """Rows of a tile where no segment has more than ``longest``: the windows of Qwen2.5-VL have 64, and would
    leave half of a larger tile idle."""
    most = 32 if dtype == torch.float32 else 128
    return min(most, max(16, triton.next_power_of_2(longest)))


def tiles_of(segments: Iterable[tuple[int, int]], rows: int) -> npt.NDArray[np.int32]:
    """Tiles [n, FIELDS] of ``rows`` rows, of ``segments``, each rows [start, stop) of a packed batch."""
    found = [
        (row, min(rows, stop - row), start, stop)
        for start, stop in segments
        for row in range(start, stop, rows)
    ]
    return np.array(found, np.int32).reshape(-1, FIELDS)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, rows: int, out: torch.Tensor
) -> None:
    """Rows of ``out`` [T, heads, dim], contiguous, become softmax(q k^T / sqrt(dim)) v over what their tile
    sees. ``q, k, v`` [T, heads, dim], strided as they come; ``tiles`` int32 [n, FIELDS], of up to ``rows``
    rows, a power of two. Rows in no tile are not written."""
    heads, dim = q.shape[1:]
    assert out.is_contiguous()
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    if not tiles.shape[0]:
        return
    shape, options = _options(q.dtype, dim, rows)
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    varlen_kernel[tiles.shape[0], heads](
        *(q, k, v, tiles, out, *strides),
        dim**-0.5 * math.log2(math.e),
        **shape,
        APART=math.gcd(8, *strides),
        **options,
    )


def _options(dtype: torch.dtype, dim: int, rows: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of the kernel, and what else a launch is told."""
    wide = max(16, 1 << dim.bit_length() - 1)
    rest = max(16, triton.next_power_of_2(dim - wide)) if dim > wide else 0
    if wide + rest > 3 * wide // 2:  # two pieces would be hardly less than one
        wide, rest = 2 * wide, 0
    shape = {"DIM": dim, "BLOCK_D": wide, "BLOCK_R": rest or 16, "REST": rest > 0, "BLOCK_M": rows}
    if dtype == torch.float32:
        return shape | {"BLOCK_N": 32 if wide <= 128 else 16}, {"num_warps": 4, "num_stages": 1}
    warps = 8 if rows >= 128 and wide >= 128 else 4
    narrow = wide <= 128
    return shape | {"BLOCK_N": 64 if narrow else 32}, {"num_warps": warps, "num_stages": 3 if narrow else 2}


def _example(dtype: torch.dtype, dim: int, longest: int) -> Example:
    kind = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    strides = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")
    types = dict.fromkeys(("q", "k", "v", "out"), kind) | {"tiles": "*i32", "scale": "fp32"}
    values, options = _options(dtype, dim, tile_rows(longest, dtype))
    aligned = strides if dim % 16 == 0 else strides[::2]
    return Example(
        varlen_kernel, types | dict.fromkeys(strides, "i32"), values | {"APART": 8}, aligned, options
    )


EXAMPLES = [
    _example(torch.bfloat16, 32, 1024),
    _example(torch.bfloat16, 64, 1024),
    _example(torch.bfloat16, 72, 1024),
    _example(torch.bfloat16, 80, 64),
    _example(torch.bfloat16, 256, 1024),
    _example(torch.float32, 80, 64),
    _example(torch.float32, 256, 1024),
]
