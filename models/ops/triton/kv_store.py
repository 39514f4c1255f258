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
    dim,
    DIM: tl.constexpr,
):
    """One program a row and a head."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.arange(0, DIM)
    there = (at < dim) & (slot >= 0)
    place = head * pool_head + slot * dim + at
    row = row.to(tl.int64)
    tl.store(keys + place, tl.load(k + row * k_row + head * k_head + at, there), there)
    tl.store(values + place, tl.load(v + row * v_row + head * v_head + at, there), there)


def store(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Row t of ``k, v`` [T, kv_heads, dim] becomes slot ``slots[t]`` of ``keys, values`` [kv_heads, slots,
    dim], of one dtype; ``slots`` int32 [T], -1 for rows that are not kept."""
    rows, heads, dim = k.shape
    assert k.stride(2) == v.stride(2) == keys.stride(2) == 1
    assert keys.stride() == values.stride()
    assert keys.stride(1) == dim
    if rows:
        store_kernel[rows, heads](
            *(k, v, keys, values, slots),
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), dim),
            DIM=triton.next_power_of_2(dim),
            num_warps=1,
        )


EXAMPLES = [
    Example(
        store_kernel,
        dict.fromkeys(("k", "v", "keys", "values"), "*bf16")
        | {"slots": "*i32", "pool_head": "i64"}
        | dict.fromkeys(("k_row", "k_head", "v_row", "v_head", "dim"), "i32"),
        {"DIM": 128},
        aligned=("k_row", "k_head", "v_row", "v_head", "pool_head", "dim"),
        options={"num_warps": 1},
    )
]
