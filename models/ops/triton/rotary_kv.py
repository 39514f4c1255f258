"""Rotary positions: the tables of M-RoPE, and the norm of the heads, their rotation and the store of keys and
values in one pass over what the projection wrote."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mmserve.models.ops.triton.parts import INTERPRETED, rounded
from mmserve.models.ops.triton.runtime import Example

HEADS = 4  # of one program
ROWS = 8  # of a table, in one program


@triton.jit(do_not_specialize=["axis_stride", "rows"])
def mrope_kernel(
    positions, frequencies, axes, cos, sin, axis_stride, rows, half, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """Tables of ROWS rows a program: frequency j turns by the position on ``axes[j]``, whichever way the
    axes share the frequencies out."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    there = (row < rows) & (at < half)
    axis = tl.load(axes + at, at < half, other=0)
    position = tl.load(positions + axis * axis_stride + row, there, other=0)
    angle = position.to(tl.float32) * tl.load(frequencies + at, at < half, other=0.0)
    if INTERPRETED:
        c, s = tl.cos(angle), tl.sin(angle)
    else:  # exact for angles of any size, as torch's are
        c, s = libdevice.cos(angle), libdevice.sin(angle)
    c, minus_s = rounded(c, cos.dtype.element_ty), rounded(-s, cos.dtype.element_ty)
    place = row.to(tl.int64) * 2 * half + at
    tl.store(cos + place, c, there)
    tl.store(cos + place + half, c, there)
    tl.store(sin + place, minus_s, there)
    tl.store(sin + place + half, rounded(s, cos.dtype.element_ty), there)


@triton.jit
def rotate_kernel(
    heads,
    weight,
    cos,
    sin,
    keys,
    values,
    slots,
    heads_row,
    queries,
    rotated,
    count,
    half,
    pool_head: tl.int64,
    pool_slot: tl.int64,
    eps,
    NORMED: tl.constexpr,
    STORED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program a row and HEADS of its heads: the first ``rotated`` are normed and rotated, all in float32
    and rounded once. They stay where they are, but with STORED only the ``queries`` before all others: keys
    and the values behind them go to their slot, and nowhere where it is negative."""
    KIND: tl.constexpr = heads.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, HALF)[None, :]
    dim = 2 * half
    there = (head < count) & (at < half)
    turned = there & (head < rotated)
    place = row * heads_row + head * dim + at
    low = tl.load(heads + place, there, other=0.0).to(tl.float32)
    high = tl.load(heads + place + half, there, other=0.0).to(tl.float32)
    left, right = low, high
    if NORMED:
        square = tl.sum(low * low, 1, keep_dims=True) + tl.sum(high * high, 1, keep_dims=True)
        scale = 1.0 / tl.sqrt_rn(square / dim + eps)
        first = tl.load(weight + head * dim + at, turned, other=0.0).to(tl.float32)
        second = tl.load(weight + head * dim + at + half, turned, other=0.0).to(tl.float32)
        left = rounded(left * scale, KIND).to(tl.float32) * first
        right = rounded(right * scale, KIND).to(tl.float32) * second
        left, right = rounded(left, KIND).to(tl.float32), rounded(right, KIND).to(tl.float32)
    table = row * dim + at
    c_low = tl.load(cos + table, at < half, other=0.0).to(tl.float32)
    c_high = tl.load(cos + table + half, at < half, other=0.0).to(tl.float32)
    s_low = tl.load(sin + table, at < half, other=0.0).to(tl.float32)
    s_high = tl.load(sin + table + half, at < half, other=0.0).to(tl.float32)
    out_low = rounded(tl.where(turned, left * c_low + right * s_low, low), KIND)
    out_high = rounded(tl.where(turned, right * c_high + left * s_high, high), KIND)
    own = turned
    if STORED:
        own = turned & (head < queries)
        slot = tl.load(slots + row).to(tl.int64)
        kept = there & (head >= queries) & (slot >= 0)
        key, value = kept & (head < rotated), kept & (head >= rotated)
        key_place = (head - queries) * pool_head + slot * pool_slot + at
        value_place = (head - rotated) * pool_head + slot * pool_slot + at
        tl.store(keys + key_place, out_low, key)
        tl.store(keys + key_place + half, out_high, key)
        tl.store(values + value_place, out_low, value)
        tl.store(values + value_place + half, out_high, value)
    tl.store(heads + place, out_low, own)
    tl.store(heads + place + half, out_high, own)


def mrope(
    positions: torch.Tensor, frequencies: torch.Tensor, axes: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.mrope``: positions int64 [3, T] of any first stride, frequencies float32 [dim / 2], axes
    int64 [dim / 2]."""
    assert positions.stride(1) == 1 or positions.shape[1] == 1
    rows, half = positions.shape[1], frequencies.shape[0]
    cos, sin = (frequencies.new_empty(rows, 1, 2 * half, dtype=dtype) for _ in range(2))
    if rows:
        mrope_kernel[triton.cdiv(rows, ROWS),](
            *(positions, frequencies, axes, cos, sin, positions.stride(0), rows, half),
            ROWS=ROWS,
            HALF=triton.next_power_of_2(half),
            num_warps=2,
        )
    return cos, sin


def rotate_heads(
    heads: torch.Tensor,
    count: int,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """As ``reference.rotate_heads``: heads [T, n, dim], those of a row one after another; tables [T, 1, dim]
    contiguous, of any float dtype."""
    _rotate(heads, (0, count, count), weight, eps, cos, sin, None)


def rotate_store(
    heads: torch.Tensor,
    split: tuple[int, int, int],
    weight: torch.Tensor | None,
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> None:
    """As ``reference.rotate_store``, but the keys in ``heads`` stay as they were: only their slots hold them
    rotated. Keys and values [kv_heads, slots, dim] may have any strides but the last."""
    queries, kv_heads, _ = split
    counts = (queries, queries + kv_heads, queries + 2 * kv_heads)
    _rotate(heads, counts, weight, eps, *tables, (*pool, slots))


def _rotate(
    heads: torch.Tensor,
    counts: tuple[int, int, int],
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    store: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """``counts``: up to where heads are queries, rotated, and looked at."""
    rows, _, dim = heads.shape
    assert heads.stride()[1:] == (dim, 1), "heads of a row lie one after another"
    assert cos.is_contiguous(), "tables are made as rows"
    assert sin.is_contiguous(), "tables are made as rows"
    assert weight is None or weight.is_contiguous()
    keys, values, slots = store or (heads, heads, cos)
    assert keys.stride() == values.stride()
    assert keys.stride(-1) == 1
    if rows:
        rotate_kernel[rows, triton.cdiv(counts[2], HEADS)](
            *(heads, cos if weight is None else weight, cos, sin, keys, values, slots),
            *(heads.stride(0), *counts, dim // 2, keys.stride(0), keys.stride(1), eps),
            NORMED=weight is not None,
            STORED=store is not None,
            HEADS=HEADS,
            HALF=triton.next_power_of_2(dim // 2),
            num_warps=2,
        )


_COUNTS = dict.fromkeys(("heads_row", "queries", "rotated", "count", "half"), "i32")
_STRIDES = {"pool_head": "i64", "pool_slot": "i64", "eps": "fp32"}
EXAMPLES = [
    Example(
        rotate_kernel,
        dict.fromkeys(("heads", "weight", "keys", "values"), kind)
        | {"cos": table, "sin": table, "slots": "*i32"}
        | _COUNTS
        | _STRIDES,
        {"NORMED": normed, "STORED": stored, "HEADS": HEADS, "HALF": half},
        aligned=("heads_row", "pool_head", "pool_slot"),
        options={"num_warps": 2},
    )
    for kind, table, normed, stored, half in (
        ("*bf16", "*bf16", True, True, 64),
        ("*bf16", "*fp32", False, False, 64),  # a vision transformer's: heads of 72 and 80
        ("*fp32", "*fp32", False, True, 32),
    )
] + [
    Example(
        mrope_kernel,
        {"positions": "*i64", "frequencies": "*fp32", "axes": "*i64", "cos": "*bf16", "sin": "*bf16"}
        | {"axis_stride": "i32", "rows": "i32", "half": "i32"},
        {"ROWS": ROWS, "HALF": 64},
        options={"num_warps": 2},
    )
]
