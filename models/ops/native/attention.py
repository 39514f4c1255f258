"""Attention by ``attention.cpp``: over the segments of a packed batch, and over the paged KV pool.

Who sees what is told by arrays int64 that the caller keeps alive: contexts [n, 6] and runs [m, 2], whose rows
are the structures Context and Run of the source.
"""

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from mmserve.models.ops.cpu import bf16_instructions
from mmserve.models.ops.native import library
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.ops import SUFFIXES
from mmserve.models.ops.native.recording import Kernel

# Queries are rows [row, row + rows) of q and of the result. They belong to a context of ``keys`` tokens, of
# which the first query sees ``seen`` and each next one more, or all see all. Its runs are [run, run + runs).
CONTEXT = ("row", "rows", "keys", "seen", "run", "runs")
# From token ``first`` of a context on, up to the next run's, tokens lie in rows ``row``, row + 1, ...
RUN = ("first", "row")

Numbers = npt.NDArray[np.int64]


def _fields(*, pointers: str = "", numbers: str = "") -> list[tuple[str, type]]:
    return [(n, ctypes.c_void_p) for n in pointers.split()] + [(n, ctypes.c_int64) for n in numbers.split()]


class Heads(ctypes.Structure):
    _fields_ = _fields(pointers="data", numbers="row head")

    @classmethod
    def of(cls, x: torch.Tensor) -> "Heads":
        """Heads [rows, heads, dim] where they lie."""
        row, head, number = x.stride()
        assert number == 1, "the numbers of a head lie one after another"
        return cls(x.data_ptr(), row, head)


class Job(ctypes.Structure):
    _fields_ = [
        *((name, Heads) for name in ("q", "k", "v", "out")),
        *_fields(numbers="heads kv_heads dim causal contexts"),
        *_fields(pointers="context run"),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("job", Job),
        *_fields(numbers="rows"),
        *_fields(pointers="slot pool"),
        *_fields(numbers="slots"),
    ]


class NativeAttentionKernels:
    """NativeUnavailable where they cannot be had. Made once a process: ``kernels``."""

    def __init__(self) -> None:
        found = library.load("attention")
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        step = (pointer, number, number, *(pointer, number) * 3, pointer)
        self.attend = _declared(found, "attend", pointer)
        self.attend_step = _declared(found, "attend_step", *step)


@cache
def kernels() -> NativeAttentionKernels:
    """The kernels, compiled when first asked for. NativeUnavailable."""
    return NativeAttentionKernels()


def unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot attend on ``device`` in ``dtype``; None when they can."""
    if device.type != "cpu":
        return "they run on a CPU only"
    if dtype not in SUFFIXES:
        return f"they do not compute {dtype}"
    try:
        kernels()
    except NativeUnavailable as error:
        return str(error)
    return None


def left_to_torch(dtype: torch.dtype) -> str | None:
    """Why torch's matrix products are the better ones for many queries at once; None when they are not."""
    flag = bf16_instructions() if dtype == torch.bfloat16 else None
    return f"this CPU multiplies bf16 itself ({flag})" if flag else None


def attend_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    first_queries: Numbers,
    queries: int,
    first_keys: Numbers,
    keys: int,
) -> None:
    """Segment i: ``queries`` rows of q and out from ``first_queries[i]`` on see ``keys`` rows of k and v from
    ``first_keys[i]`` on, all of them.

    [rows, heads, dim] each, strided as they come; k and v may have other rows, and fewer heads, than q.
    """
    count = len(first_keys)
    each = np.ones(count, np.int64)
    contexts = np.stack(
        (first_queries, queries * each, keys * each, keys * each, np.arange(count), each), axis=1
    )
    runs = np.stack((0 * each, first_keys), axis=1)
    job = Job(
        *(Heads.of(x) for x in (q, k, v, out)),
        *(q.shape[1], k.shape[1], q.shape[2], 0, count),
        *(contexts.ctypes.data, runs.ctypes.data),
    )
    kernels().attend[q.dtype](ctypes.addressof(job))


def _declared(library_: ctypes.CDLL, name: str, *arguments: type) -> dict[torch.dtype, Kernel]:
    return {dtype: Kernel(library_, f"{name}_{suffix}", *arguments) for dtype, suffix in SUFFIXES.items()}
