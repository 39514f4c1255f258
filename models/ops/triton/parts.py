"""What several kernels are made of."""

import triton
import triton.language as tl

from mmserve.models.ops.triton import runtime

INTERPRETED = tl.constexpr(runtime.INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in float32. float32 operands are multiplied as such, not as TF32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
