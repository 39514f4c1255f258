"""What several kernels are made of."""

import triton
import triton.language as tl

from mmserve.models.ops.triton import runtime

INTERPRETED = tl.constexpr(runtime.INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in float32. Of float32 operands nearly all bits count: three products of TF32 make one,
    in the matrix units."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def slots_of(pages, tokens, there, ALL: tl.constexpr, PAGE: tl.constexpr):
    """The KV slots, int64, of ``tokens`` of the request whose page numbers begin at ``pages``."""
    page = loaded(pages + tokens // PAGE, there, ALL)
    return page.to(tl.int64) * PAGE + tokens % PAGE


@triton.jit
def loaded(pointers, there, ALL: tl.constexpr):
    """What ``pointers`` point at, 0 where nothing is ``there``; with ALL it is everywhere, and not asked."""
    if ALL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, there, other=0)


@triton.jit
def softmax_step(scores, top, total):
    """The running softmax (base 2) of each row goes on by ``scores`` [M, N], -inf where nothing is seen.

    ``top`` [M] is the largest score so far, ``total`` [M] the sum of weights relative to it. Returns the
    weights of ``scores``, what all earlier sums shrink by [M], and the new ``top`` and ``total``.
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(top - level)
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def quotient(acc, total):
    """``acc`` [M, D] over ``total`` [M]; 0 for rows that have seen nothing."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """float32 ``x`` as ``KIND``, the nearest, of two as near the even one. The interpreter cuts bf16 off."""
    if INTERPRETED and tl.bfloat16 == KIND:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(KIND)
