"""Attention by kernels in C++ over the pool as it lies: the backend for CPUs."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from mmserve.engine.attention.base import Span
from mmserve.engine.attention.matmul import PromptBlocks
from mmserve.engine.kv.page_table import SlotRun
from mmserve.engine.kv.pool import KVPool
from mmserve.models.ops.native.attention import CONTEXT, RUN, Job, Step, kernels, left_to_torch

FEW = 32  # rows, for which a kernel of C++ is no slower than products of bf16 instructions


class NativeAttention:
    """One call a layer for the whole batch: it stores the new keys and values, and attends.

    A context is told as its runs of slots, so nothing of it is copied, whether requests share it or it is
    scattered. Where the CPU multiplies bf16 itself, chunks of prompts in bf16 are left to torch's products,
    which use that, unless they are of a few rows.
    """

    # Of a plan, decodes and small chunks read nothing but ``_step``, which stays where it is.
    capturable = True
    captured_rows = FEW
    form = "plain"

    def __init__(self, pool: KVPool) -> None:
        """NativeUnavailable where the kernels cannot be had."""
        self.pool = pool
        self._attend = kernels().attend_step[pool.shape.dtype]
        self._blocks = PromptBlocks(pool) if left_to_torch(pool.shape.dtype) else None
        self._step = Step()

    def plan(self, spans: Sequence[Span], num_rows: int) -> None:
        runs = [s.table.slot_runs(0, s.stop) for s in spans]
        left = [self._blocks is not None and len(s) > FEW for s in spans]  # to torch
        self._prompts = [(s, r) for s, r, torchs in zip(spans, runs, left, strict=True) if torchs]
        self._slots = _new_slots(spans, runs, num_rows)
        ours = [(s, r) for s, r, torchs in zip(spans, runs, left, strict=True) if not torchs]
        self._contexts, self._runs = _contexts(ours)
        shape, data = self.pool.shape, self.pool.data
        job = Job(kv_heads=shape.kv_heads, dim=shape.head_dim, causal=1, contexts=len(ours))
        job.context, job.run = self._contexts.ctypes.data, self._runs.ctypes.data
        step = self._step
        step.job, step.rows, step.slot = job, num_rows, self._slots.ctypes.data
        step.pool, step.slots = data.data_ptr(), data.shape[3]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
        out = torch.empty_like(q)
        self._attend(
            *(ctypes.addressof(self._step), layer, q.shape[1], q.data_ptr(), q.stride(0)),
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), out.data_ptr()),
        )
        if self._blocks is not None:
            for span, runs in self._prompts:
                rows = slice(span.row, span.row + len(span))
                self._blocks.attend(q[rows], runs, layer, span.start, out[rows])
        return out


def _new_slots(spans: Sequence[Span], runs: list[list[SlotRun]], num_rows: int) -> np.ndarray:
    """Where each row's key and value go, int64 [num_rows]; -1 for padding."""
    slots = np.full(num_rows, -1, dtype=np.int64)
    for span, context in zip(spans, runs, strict=True):
        if len(span) == 1:
            slots[span.row] = context[-1][1] - 1
        else:
            slots[span.row : span.row + len(span)] = span.table.slots(span.start, span.stop)
    return slots


def _contexts(spans: Sequence[tuple[Span, list[SlotRun]]]) -> tuple[np.ndarray, np.ndarray]:
    """The kernels' CONTEXT of each span, and all their RUNs."""
    contexts: list[Sequence[int]] = []
    runs: list[Sequence[int]] = []
    for span, context in spans:
        contexts.append((span.row, len(span), span.stop, span.start + 1, len(runs), len(context)))
        first = 0
        for a, b in context:
            runs.append((first, a))
            first += b - a
    return _array(contexts, len(CONTEXT)), _array(runs, len(RUN))


def _array(rows: list[Sequence[int]], width: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _side_by_side(heads: torch.Tensor) -> torch.Tensor:
    """Heads [T, n, dim] of which those of one row lie one after another."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
