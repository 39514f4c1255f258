"""Patches of uint8 pixels, projected where they lie: no float picture and no cut one is ever written.

Normalisation stands in the weights (``encoders/patch_embed.py``); what is left of it is to centre by 128,
which is exact in every float type. Rows are patches in merge-block order, so that those of one merged token
are neighbours, and the address of each pixel follows from its patch and its place in it.
"""

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.parts import dot, rounded
from mmserve.models.ops.triton.runtime import INTERPRETED, Example

# Patches, outputs and inputs of one program's tile; the interpreter has no use for small ones.
TILE = {"BM": 256, "BN": 256, "BK": 256} if INTERPRETED else {"BM": 128, "BN": 128, "BK": 32}


@triton.jit(do_not_specialize=["count", "tokens_wide"])
def embed_patches_kernel(
    pixels,
    weight,
    bias,
    out,
    count,
    tokens_wide,
    hidden,
    inputs,
    frame_stride: tl.int64,
    line_stride,
    out_row,
    PATCH: tl.constexpr,
    CHANNELS: tl.constexpr,
    MERGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One program BM patches and BN outputs. Inputs come in the order (frame, y, x, channel)."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    token, inner = m // (MERGE * MERGE), m % (MERGE * MERGE)
    y = token // tokens_wide * MERGE + inner // MERGE
    x = token % tokens_wide * MERGE + inner % MERGE
    corner = (y * PATCH).to(tl.int64) * line_stride + x * (PATCH * CHANNELS)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inputs, BK):
        k = start + tl.arange(0, BK)
        frame, rest = k // (PATCH * PATCH * CHANNELS), k % (PATCH * PATCH * CHANNELS)
        line, along = rest // (PATCH * CHANNELS), rest % (PATCH * CHANNELS)
        place = frame * frame_stride + line * line_stride + along
        there = (m < count)[:, None] & (k < inputs)[None, :]
        raw = tl.load(pixels + corner[:, None] + place[None, :], there, other=128)
        centred = (raw.to(tl.float32) - 128.0).to(weight.dtype.element_ty)
        weights = weight + n[None, :].to(tl.int64) * inputs + k[:, None]
        acc = dot(centred, tl.load(weights, (n < hidden)[None, :] & (k < inputs)[:, None], other=0.0), acc)
    acc += tl.load(bias + n, n < hidden, other=0.0).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * out_row + n[None, :]
    tl.store(out + place, rounded(acc, out.dtype.element_ty), (m < count)[:, None] & (n < hidden)[None, :])


def embed_patches(
    pixels: torch.Tensor,
    grid: tuple[int, int],
    merge: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See ``registry.EmbedPatches``; ``pixels`` on the weights' device, lines one after another, ``weight``,
    ``bias`` and ``out`` of one dtype. ValueError when the pixels do not have the size that the grid says."""
    (h, w), (frames, height, width, channels) = grid, pixels.shape
    hidden, inputs = weight.shape
    patch = height // h
    if (height, width) != (h * patch, w * patch) or h % merge or w % merge:
        raise ValueError(f"pixels {width}x{height} do not fit a grid of {w}x{h} patches")
    assert inputs == frames * patch * patch * channels
    assert pixels.stride()[2:] == (channels, 1)
    assert out.stride(1) == 1
    assert weight.is_contiguous()
    tiles = (triton.cdiv(h * w, TILE["BM"]), triton.cdiv(hidden, TILE["BN"]))
    embed_patches_kernel[tiles](
        *(pixels, weight, bias, out, h * w, w // merge, hidden, inputs),
        *(pixels.stride(0), pixels.stride(1), out.stride(0)),
        PATCH=patch,
        CHANNELS=channels,
        MERGE=merge,
        num_warps=8,
        num_stages=3,
        **TILE,
    )


_COUNTS = ("count", "tokens_wide", "hidden", "inputs", "line_stride", "out_row")
EXAMPLES = [
    Example(
        embed_patches_kernel,
        {"pixels": "*u8", "weight": kind, "bias": kind, "out": kind, "frame_stride": "i64"}
        | dict.fromkeys(_COUNTS, "i32"),
        {"PATCH": patch, "CHANNELS": 3, "MERGE": 2, "BM": 128, "BN": 128, "BK": 32},
        aligned=("hidden", "out_row", "line_stride", "frame_stride") + (("inputs",) if patch == 16 else ()),
        options={"num_warps": 8, "num_stages": 3},
    )
    for kind, patch in (("*bf16", 16), ("*bf16", 14), ("*fp32", 16))
]
