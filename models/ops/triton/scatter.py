"""The encoder's rows into the decoder's: vision tokens in place of embeddings, deepstack features on top."""

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.parts import rounded
from mmserve.models.ops.triton.runtime import Example

BLOCK = 1024


@triton.jit
def scatter_kernel(
    target, rows, features, target_row, features_row, width, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a block of one of ``features``' rows; where ``rows`` is negative it goes nowhere."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(rows + row).to(tl.int64)
    there = (at < width) & (place >= 0)
    value = tl.load(features + row * features_row + at, there, other=0.0)
    aim = target + place * target_row + at
    if ADD:
        before = tl.load(aim, there, other=0.0)
        value = rounded(before.to(tl.float32) + value.to(tl.float32), target.dtype.element_ty)
    tl.store(aim, value, there)


def scatter_rows(target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor) -> None:
    """As ``reference.scatter_rows``, in one dtype; rows may lie apart. Negative ``rows`` are padding."""
    _scatter(target, rows, features, add=False)


def scatter_add_rows(target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor) -> None:
    """As ``reference.scatter_add_rows``; as above."""
    _scatter(target, rows, features, add=True)


def _scatter(target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor, *, add: bool) -> None:
    assert target.stride(1) == features.stride(1) == 1
    count, width = features.shape
    if count:
        scatter_kernel[count, triton.cdiv(width, BLOCK)](
            *(target, rows, features, target.stride(0), features.stride(0), width),
            ADD=add,
            BLOCK=BLOCK,
            num_warps=4,
        )


EXAMPLES = [
    Example(
        scatter_kernel,
        {"target": "*bf16", "rows": "*i64", "features": "*bf16"}
        | dict.fromkeys(("target_row", "features_row", "width"), "i32"),
        {"ADD": add, "BLOCK": BLOCK},
        aligned=("target_row", "features_row", "width"),
        options={"num_warps": 4},
    )
    for add in (False, True)
]
