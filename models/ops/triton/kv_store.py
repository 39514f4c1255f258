"""New keys and values into their slots of the KV pool."""

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.runtime import Example


@triton.jit
def store_kernel(
    k,
    v,
    keys,
    values,
    slots,
    k_row,
    k_head,
    v_row,
    v_head,
    pool_head: tl.int64,
    heads,
    dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
        there = (head < heads) & (at < dim)
        place = head * pool_head + slot * dim + at
        tl.store(keys + place, tl.load(k + row * k_row + head * k_head + at, there), there)
        tl.store(values + place, tl.load(v + row * v_row + head * v_head + at, there), there)


def store(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Row t of ``k, v`` [T, kv_heads, dim] becomes slot ``slots[t]`` of ``keys, values`` [kv_heads, slots,
    dim], of one dtype; ``slots`` int [T], negative for rows that are not kept."""
    rows, heads, dim = k.shape
    assert k.stride(2) == v.stride(2) == keys.stride(2) == 1
    assert keys.stride() == values.stride()
    assert keys.stride(1) == dim
    if rows:
        store_kernel[(rows,)](
            *(k, v, keys, values, slots),
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), heads, dim),
            HEADS=triton.next_power_of_2(heads),
            DIM=triton.next_power_of_2(dim),
            num_warps=4,
        )


EXAMPLES = [
    Example(
        store_kernel,
        dict.fromkeys(("k", "v", "keys", "values"), "*bf16")
        | {"slots": "*i32", "pool_head": "i64"}
        | dict.fromkeys(("k_row", "k_head", "v_row", "v_head", "heads", "dim"), "i32"),
        {"HEADS": 8, "DIM": 128},
        aligned=("k_row", "k_head", "v_row", "v_head", "pool_head", "dim"),
        options={"num_warps": 4},
    )
]
