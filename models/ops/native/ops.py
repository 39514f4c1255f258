"""The small operations by ``ops.cpp``: one pass over each row, one call for what takes torch several.

All round where ``reference.py`` rounds, but for rotary positions, whose sum of products is rounded once; sums
over a row are taken in another order. A row's result is the same whatever else is in the batch.
"""

import ctypes
from functools import cache

import torch

from mmserve.models.ops.native import library
from mmserve.models.ops.native.recording import Kernel

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NativeOps:
    """Tensors lie on the CPU; rows are contiguous, and those of 2-D inputs may be any distance apart.

    NativeUnavailable where the kernels cannot be had. Made once a process: ``native_ops``.
    """

    def __init__(self) -> None:
        kernels = library.load("ops")
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        norm = (pointer, number, pointer, pointer, pointer, number, number, real)
        self._rms_norm = _forms(kernels, "rms_norm", *norm)
        self._layer_norm = _forms(kernels, "layer_norm", *norm)
        self._silu_and_mul = _forms(kernels, "silu_and_mul", pointer, number, pointer, number, number)
        self._scatter = _forms(
            kernels, "scatter", pointer, number, pointer, pointer, number, number, number, number
        )
        rotate = (pointer, *(number,) * 4, pointer, real, pointer, pointer)
        self._rotate = {table: _forms(kernels, "rotate", *rotate, table=table) for table in SUFFIXES}

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.contiguous()
        return self._norm(x, residual, weight, eps), residual

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        rows = _rows(x)
        out = torch.empty_like(rows)  # dense, and much cheaper to ask for than by shape and dtype
        count, width = rows.shape
        total = None if residual is None else residual.data_ptr()
        pointers = (total, weight.data_ptr(), out.data_ptr())
        self._rms_norm[x.dtype](rows.data_ptr(), rows.stride(0), *pointers, count, width, eps)
        return out.view(x.shape)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        rows = _rows(x)
        out = torch.empty_like(rows)
        count, width = rows.shape
        pointers = (weight.data_ptr(), bias.data_ptr(), out.data_ptr())
        self._layer_norm[x.dtype](rows.data_ptr(), rows.stride(0), *pointers, count, width, eps)
        return out.view(x.shape)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1] // 2
        rows, out = _rows(x), x.new_empty((*x.shape[:-1], width))
        self._silu_and_mul[x.dtype](rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[0], width)
        return out

    def rotate_heads(
        self,
        heads: torch.Tensor,
        count: int,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        rows, _, dim = heads.shape
        stride, *inner = heads.stride()
        assert inner == [dim, 1], "heads of a row lie one after another"
        assert cos.is_contiguous(), "tables are made as rows"
        norm = None if weight is None else weight.data_ptr()
        self._rotate[cos.dtype][heads.dtype](
            *(heads.data_ptr(), stride, rows, count, dim, norm, eps, cos.data_ptr(), sin.data_ptr())
        )

    def scatter_rows(self, target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor) -> None:
        self._scattered(target, rows, features, add=False)

    def scatter_add_rows(self, target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor) -> None:
        self._scattered(target, rows, features, add=True)

    def _scattered(
        self, target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor, *, add: bool
    ) -> None:
        assert target.stride(1) == features.stride(1) == rows.stride(0) == 1, "numbers lie one after another"
        assert rows.dtype == torch.int64, "as the kernel reads them"
        self._scatter[target.dtype](
            *(target.data_ptr(), target.stride(0), rows.data_ptr(), features.data_ptr(), features.stride(0)),
            *(*features.shape, add),
        )


@cache
def native_ops() -> NativeOps:
    """The kernels, compiled when first asked for. NativeUnavailable."""
    return NativeOps()


def _forms(
    kernels: ctypes.CDLL, name: str, *arguments: type, table: torch.dtype | None = None
) -> dict[torch.dtype, Kernel]:
    """``name`` for each dtype that it takes, its arguments declared."""
    found: dict[torch.dtype, Kernel] = {}
    for dtype, suffix in SUFFIXES.items():
        whole = f"{name}_{suffix}" + (f"_{SUFFIXES[table]}" if table else "")
        found[dtype] = Kernel(kernels, whole, *arguments)
    return found


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as rows [n, width], each contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
