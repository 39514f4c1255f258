"""As ``launched.py`` for the fused kernels: launches them in the ways of serving, compiled for sm_90 and run
nowhere, and prints as JSON which kernels each way had compiled.

``python tests/helpers/launched_ops.py``, without TRITON_INTERPRET.
"""

import json

import torch
from asked import request
from launched import Hopper, only_compiled
from triton.runtime import driver

from mmserve.engine.sampling.sampler import Sampler
from mmserve.models.ops.registry import triton_ops

VOCAB, BF16 = 151_936, torch.bfloat16


def prepare(launched):
    """What is compiled before anything is served."""
    Sampler("triton").prepare(VOCAB, torch.device("cpu"), BF16)


def draws(launched):
    """Of batches of many sizes and wishes."""
    sampler = Sampler("triton")
    wishes = [
        {"top_p": 0.9, "bad": ((1, 2, 3), (4,))},
        {"repetition_penalty": 1.2},
        {"logit_bias": {1: 1.0}, "top_k": 9},
    ]
    for count in (1, 2, 3, 16, 17):
        asked = [request(str(i), **wishes[i % 3]) for i in range(count)]
        for _ in range(3):
            sampler.draw(torch.zeros(count, VOCAB, dtype=BF16), asked)


def embed(grids, patch):
    ops = triton_ops()
    weight, bias = torch.empty(1152, patch * patch * 3, dtype=BF16), torch.empty(1152, dtype=BF16)
    for h, w in grids:
        pixels = torch.empty(1, h * patch, w * patch, 3, dtype=torch.uint8)
        ops.embed_patches(pixels, (h, w), 2, weight, bias, torch.empty(h * w, 1152, dtype=BF16))


def steps(lengths):
    """The decoder's operations for so many rows."""
    ops = triton_ops()
    turns, axes = torch.empty(64), torch.zeros(64, dtype=torch.int64)
    pool = tuple(torch.empty(2, 8, 4096, 128, dtype=BF16))
    norm, weight = torch.empty(48, 128, dtype=BF16)[:40], torch.empty(4096, dtype=BF16)
    for rows in lengths:
        tables = ops.mrope(torch.zeros(3, rows, dtype=torch.int64), turns, axes, BF16)
        heads, slots = torch.empty(rows, 48, 128, dtype=BF16), torch.zeros(rows, dtype=torch.int32)
        ops.rotate_store(heads, (32, 8, 8), norm, 1e-6, tables, pool, slots)
        x = torch.empty(rows, 4096, dtype=BF16)
        ops.add_rms_norm(x, x.clone(), weight, 1e-6)
        ops.silu_and_mul(torch.empty(rows, 24576, dtype=BF16))
        features = torch.empty(rows, 4, 4096, dtype=BF16)
        ops.scatter_rows(x, torch.arange(rows), features[:, 0])
        ops.scatter_add_rows(x, torch.arange(rows), features[:, 3])


WAYS = {
    "prepared": prepare,
    "draws": draws,
    "pictures of patch 16": lambda launched: embed([(2, 2), (4, 6), (2, 64), (48, 62)], 16),
    "pictures of patch 14": lambda launched: embed([(2, 2), (4, 6), (2, 64), (48, 62)], 14),
    "steps": lambda launched: steps([1, 2, 7, 16, 48, 511]),
}


def main():
    launched, told = [], {}
    driver.set_active(Hopper())
    only_compiled(launched)
    for name, way in WAYS.items():
        launched.clear()
        way(launched)
        told[name] = sorted(set(launched))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
