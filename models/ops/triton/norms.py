"""RMSNorm, alone or behind the addition of a branch to the residual sum, and LayerNorm: one read a row."""

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.parts import rounded
from mmserve.models.ops.triton.runtime import Example


@triton.jit
def rms_norm_kernel(x, residual, weight, out, x_row, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row. With ADD the row of ``residual`` becomes the sum, which is rounded before it is
    normed, as the reference does."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    value = tl.load(x + row * x_row + at, there, other=0.0)
    if ADD:
        before = tl.load(residual + row * width + at, there, other=0.0)
        value = rounded(before.to(tl.float32) + value.to(tl.float32), out.dtype.element_ty)
        tl.store(residual + row * width + at, value, there)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    normed = rounded(wide * scale, out.dtype.element_ty).to(tl.float32)
    scaled = tl.load(weight + at, there, other=0.0).to(tl.float32) * normed
    tl.store(out + row * width + at, rounded(scaled, out.dtype.element_ty), there)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, x_row, width, eps, BLOCK: tl.constexpr):
    """One program a row; the variance is that of what is left when the mean is taken off."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    wide = tl.load(x + row * x_row + at, there, other=0.0).to(tl.float32)
    centred = tl.where(there, wide - tl.sum(wide, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / width + eps)
    factor = tl.load(weight + at, there, other=0.0).to(tl.float32)
    offset = tl.load(bias + at, there, other=0.0).to(tl.float32)
    normed = factor * (centred * scale) + offset
    tl.store(out + row * width + at, rounded(normed, out.dtype.element_ty), there)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As ``reference.rms_norm``: x [..., width] whose rows may lie apart, weight [width], of one dtype."""
    return _rms_norm(x, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.add_rms_norm``; ``residual`` becomes the sum where it is contiguous."""
    residual = residual.contiguous()
    return _rms_norm(x, residual, weight, eps, out), residual


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``reference.layer_norm``: x [..., width] whose rows may lie apart, weight and bias [width]."""
    rows, out = _rows(x), x.new_empty(x.shape) if out is None else out
    count, width = rows.shape
    if count:
        layer_norm_kernel[count,](rows, weight, bias, out, rows.stride(0), width, eps, **_launch(width))
    return out


def _rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    rows, out = _rows(x), x.new_empty(x.shape) if out is None else out
    count, width = rows.shape
    added = rows if residual is None else residual
    if count:
        rms_norm_kernel[count,](
            *(rows, added, weight, out, rows.stride(0), width, eps),
            ADD=residual is not None,
            **_launch(width),
        )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as rows [n, width], each contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


EXAMPLES = [
    Example(
        rms_norm_kernel,
        dict.fromkeys(("x", "residual", "weight", "out"), kind)
        | {"x_row": "i32", "width": "i32", "eps": "fp32"},
        {"ADD": add, "BLOCK": block},
        aligned=("x_row", "width"),
        options={"num_warps": warps},
    )
    for kind, add, block, warps in (("*bf16", True, 4096, 8), ("*fp32", False, 1024, 2))
] + [
    Example(
        layer_norm_kernel,
        dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
        | {"x_row": "i32", "width": "i32", "eps": "fp32"},
        {"BLOCK": 8192},
        options={"num_warps": 16},
    )
]
