"""Launches the kernels of attention as they are launched on a GPU, up to the moment where one would run them:
arguments are bound and code is compiled for sm_90. Prints as JSON what was compiled when.

``python tests/helpers/launched.py``, without TRITON_INTERPRET.
"""

import json

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from mmserve.encoders.segments import runs, tiles_for
from mmserve.engine.attention import triton as backend
from mmserve.engine.attention.base import Extent, Span
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool, KVShape
from mmserve.models.ops.triton import varlen_attention

HEADS, KV_HEADS, DIM = 16, 8, 128


class Hopper:
    """Just so much of a driver that kernels are compiled."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def only_compiled(launched):
    """Let launches end when their kernel is compiled, and ``launched`` collect (name, code)."""
    run = jit.JITFunction.run

    def compile_alone(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launched.append((self.__name__, kernel.hash))
        return kernel

    jit.JITFunction.run = compile_alone


def steps(attention, pool):
    """Decodes of several sizes, and prompts of several lengths, by one of each; two layers each."""
    tables = [PageTable(pool.page_size) for _ in range(8)]
    for table in tables:
        table.extend(pool.allocator.allocate(20))
    decodes = [Span(row, 100, 101, table) for row, table in enumerate(tables)]
    for rows in (1, 2, 8):
        yield decodes[:rows], rows
    for length in (2, 10, 25, 33, 90, 200):
        yield [decodes[0], Span(1, 7, 7 + length, tables[1])], 8 * (length // 8 + 1)


def main():
    launched = []
    driver.set_active(Hopper())
    only_compiled(launched)
    pool = KVPool(KVShape(2, KV_HEADS, DIM, torch.bfloat16), 200, 16, "cpu")
    backend.FEW_PROCESSORS = 132
    attention = backend.TritonAttention(pool, Extent(HEADS, 64, 3000))
    attention._compile()
    before, launched[:] = list(launched), []
    for spans, rows in steps(attention, pool):
        attention.plan(spans, rows)
        qkv = torch.empty(rows, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
        for layer in range(2):
            attention.forward(*qkv.split((HEADS, KV_HEADS, KV_HEADS), 1), layer)
    for dim in (64, 72, 80):
        q, k, v = torch.empty(500, 48, dim, dtype=torch.bfloat16).chunk(3, 1)
        tiles = tiles_for(runs([300, 200]), q)
        varlen_attention.attend(q, k, v, tiles.table, tiles.rows, torch.empty_like(q).contiguous())
    print(json.dumps({"before": before, "then": launched}))


if __name__ == "__main__":
    main()
