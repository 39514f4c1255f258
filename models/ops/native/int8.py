"""Linear layers in int8 by int8.cpp: the formulas of ``ops/quantized.py``, at the speed of memory."""

import ctypes
from dataclasses import dataclass

import torch

from mmserve.models.ops.native import library
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.linear import ACTS
from mmserve.models.ops.native.recording import Kernel
from mmserve.models.ops.quantized import GROUP, PlainInt8Linear

_WIDE = {torch.float32: 1, torch.bfloat16: 0}


class _Weight(ctypes.Structure):
    """``Weight`` of int8.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("n", "k", "group")),
    )


@dataclass(frozen=True)
class PackedInt8:
    """A weight [out, in] as the kernel reads it; ``header`` points into ``codes`` and ``scales``."""

    codes: torch.Tensor
    scales: torch.Tensor
    outputs: int
    header: _Weight

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


class NativeInt8Linear:
    """Few rows take the time that memory needs to give the weights once: half of bf16's.

    ``name`` tells the instructions. A row's result is the same bit for bit alone, in any batch, at any place
    in it and with any number of threads.
    """

    def __init__(self, kernels: ctypes.CDLL | None = None) -> None:
        """``kernels``: of int8.cpp, compiled for this CPU if not given. NativeUnavailable if they cannot be
        had or compute something else than the plain form."""
        kernels = kernels or library.load("int8")
        pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        kernels.int8_path.restype = ctypes.c_char_p
        kernels.int8_block.restype = number
        kernels.int8_pack.argtypes = (pointer, pointer, number, flag, flag)
        kernels.int8_pack.restype = None
        linear = (pointer, pointer, number, number, pointer, flag, pointer, flag, flag)
        self._linear = Kernel(kernels, "int8_linear", *linear)
        rows = (pointer, pointer, number, pointer, flag, flag)
        self._rows = Kernel(kernels, "int8_rows", *rows, result=ctypes.c_bool)
        self._kernels = kernels
        self.name = f"int8 (native, {kernels.int8_path().decode()})"
        self._check()

    def pack(self, weight: torch.Tensor) -> PackedInt8:
        """Quantise a weight of float32 or bfloat16, straight from its rows."""
        weight = _with_whole_rows(weight)
        (n, k), block = weight.shape, self._kernels.int8_block()
        channels = -(-n // block) * block
        codes = torch.empty(channels * (-(-k // 4) * 4), dtype=torch.int8)
        scales = torch.empty(channels, dtype=torch.float32)
        header = _Weight(codes.data_ptr(), scales.data_ptr(), n, k, GROUP)
        self._kernels.int8_pack(
            ctypes.byref(header),
            *(weight.data_ptr(), weight.stride(0), _WIDE[weight.dtype], torch.get_num_threads()),
        )
        return PackedInt8(codes, scales, n, header)

    def __call__(
        self, x: torch.Tensor, weight: PackedInt8, bias: torch.Tensor | None, act: str | None = None
    ) -> torch.Tensor:
        """``act(x @ weight.T + bias)`` of float32 or bfloat16 [..., in] and [out], in the dtype of ``x``.
        ValueError if they do not fit."""
        if x.shape[-1] != weight.header.k:
            raise ValueError(f"x is {list(x.shape)}, not [..., {weight.header.k}]")
        rows = _with_whole_rows(x if x.dim() == 2 else x.reshape(-1, weight.header.k))
        out = x.new_empty(*x.shape[:-1], weight.outputs)
        self._linear(
            ctypes.addressof(weight.header),
            *(rows.data_ptr(), rows.stride(0), len(rows)),
            *(_address(bias, weight.outputs, x.dtype), ACTS[act]),
            *(out.data_ptr(), _WIDE[x.dtype], torch.get_num_threads()),
        )
        return out

    def rows(self, weight: PackedInt8, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows ``ids`` int64 [T] of the weight in ``dtype``, as their codes tell them. IndexError if one
        is not there."""
        out = torch.empty(len(ids), weight.header.k, dtype=dtype)
        ids = ids.contiguous()
        known = self._rows(
            ctypes.addressof(weight.header),
            *(ids.data_ptr(), len(ids), out.data_ptr(), _WIDE[dtype], torch.get_num_threads()),
        )
        if not known:
            raise IndexError(
                f"ids of a matrix of {weight.outputs} rows must be from 0 to {weight.outputs - 1}"
            )
        return out

    def _check(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(n, 70, generator=generator) for n in (40, 30))
        plain = PlainInt8Linear()
        wanted = plain(x, plain.pack(weight), weight[:, 0], "silu")
        if not torch.allclose(
            self(x, self.pack(weight), weight[:, 0].contiguous(), "silu"), wanted, atol=1e-4
        ):
            raise NativeUnavailable(f"{self.name}: its result differs from the plain form")


def _with_whole_rows(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(-1) == 1 or values.numel() == 0 else values.contiguous()


def _address(bias: torch.Tensor | None, outputs: int, dtype: torch.dtype) -> int | None:
    if bias is None:
        return None
    if bias.dtype != dtype or bias.shape != (outputs,) or not bias.is_contiguous():
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, not {dtype} [{outputs}] in one piece")
    return bias.data_ptr()
