"""SwiGLU of what the merged projection wrote: one read of both halves, one write."""

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.parts import rounded
from mmserve.models.ops.triton.runtime import Example

BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(x, out, x_row, width, BLOCK: tl.constexpr):
    """One program a block of a row. silu is rounded before the product, as the reference does."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    gate = tl.load(x + row * x_row + at, there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + at, there, other=0.0).to(tl.float32)
    silu = rounded(gate / (1.0 + tl.exp(-gate)), out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, rounded(silu * up, out.dtype.element_ty), there)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As ``reference.silu_and_mul``: x [..., 2 * width] whose rows may lie apart -> [..., width]."""
    width = x.shape[-1] // 2
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = x.new_empty((*x.shape[:-1], width)) if out is None else out
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(width, BLOCK))
        silu_and_mul_kernel[grid](rows, out, rows.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return out


EXAMPLES = [
    Example(
        silu_and_mul_kernel,
        {"x": kind, "out": kind, "x_row": "i32", "width": "i32"},
        {"BLOCK": BLOCK},
        aligned=("x_row", "width"),
        options={"num_warps": 4},
    )
    for kind in ("*bf16", "*fp32")
]
