"""Linear layers of bf16 weights by linear.cpp: as they are where the CPU multiplies pairs of bf16
(AVX512_BF16), elsewhere widened on their way into float32 sums.

With few rows memory is read at full speed; with many, pairs run at about the rate of oneDNN, and widened
weights at the rate of float32.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from mmserve.models.ops.native import library
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.recording import Kernel
from mmserve.models.ops.reference import PlainLinear

WIDTH = 32  # outputs of a panel, as in linear.cpp
_PAIRS = 2  # inputs that one instruction multiplies, where it takes bf16
ACTS = {None: 0, "gelu": 1, "gelu_pytorch_tanh": 2, "silu": 3, "quick_gelu": 4}


@dataclass(frozen=True, eq=False)
class Panels:
    """A packed weight: bf16 [ceil(outputs / 32), inputs rounded up to pairs, 32], zeros behind the last."""

    values: torch.Tensor
    outputs: int
    inputs: int


class NativeLinear:
    """Linear over bf16 weights in panels, summed in float32, rounded once after bias and activation.

    Every output is one chain of additions over the inputs in their order, whatever the number of rows and of
    threads: a row's result is the same bit for bit alone, in any batch and at any place in it.
    """

    name = "native"

    @property
    def multiplies_bf16(self) -> bool:
        """Whether weights go into the CPU's own instruction for bf16; not if the kernels cannot be had."""
        try:
            return library.load("linear").linear_step_inputs() == _PAIRS
        except NativeUnavailable:
            return False

    def pack(self, weight: torch.Tensor) -> Panels:
        """bf16 [outputs, inputs] on the CPU. NativeUnavailable if the kernels cannot be had."""
        if weight.dtype != torch.bfloat16:
            raise TypeError(f"native linear layers keep bfloat16 weights, not {weight.dtype}")
        outputs, inputs = weight.shape
        weight = weight.contiguous()
        values = torch.empty(-(-outputs // WIDTH), inputs + inputs % 2, WIDTH, dtype=torch.bfloat16)
        pack, _ = _kernels()
        pack(weight.data_ptr(), outputs, inputs, values.data_ptr(), torch.get_num_threads())
        return Panels(values, outputs, inputs)

    def __call__(
        self, x: torch.Tensor, weight: Panels, bias: torch.Tensor | None, act: str | None = None
    ) -> torch.Tensor:
        """``act(x @ weight.T + bias)`` of bf16 [..., inputs] and [outputs]. ValueError if they do not fit."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != weight.inputs:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, not bfloat16 [..., {weight.inputs}]")
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, weight.inputs).contiguous()
        y = torch.empty(*x.shape[:-1], weight.outputs, dtype=torch.bfloat16)
        _, run = _kernels()
        run(
            *(rows.data_ptr(), rows.stride(0), rows.shape[0], weight.inputs),
            *(weight.values.data_ptr(), weight.outputs, _address(bias, weight.outputs)),
            *(ACTS[act], y.data_ptr(), torch.get_num_threads()),
        )
        return y

    def unusable(self, dtype: torch.dtype) -> str | None:
        """Why this form cannot run here in ``dtype``; None when it can."""
        if dtype != torch.bfloat16:
            return f"it keeps weights in bfloat16 only, not in {str(dtype).removeprefix('torch.')}"
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(n, 70, generator=generator).bfloat16() for n in (40, 30))
        try:
            found = self(x, self.pack(weight), weight[:, 0].contiguous(), "silu")
        except NativeUnavailable as error:
            return str(error)
        wanted = PlainLinear()(x.float(), weight.float(), weight[:, 0].float(), "silu")
        close = torch.allclose(found.float(), wanted, rtol=1e-2, atol=1e-2)
        return None if close else "its result differs from the plain form"


def _address(bias: torch.Tensor | None, outputs: int) -> int | None:
    if bias is None:
        return None
    if bias.dtype != torch.bfloat16 or bias.shape != (outputs,) or not bias.is_contiguous():
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, not bfloat16 [{outputs}] in one piece")
    return bias.data_ptr()


@cache
def _kernels() -> tuple[Callable[..., None], Kernel]:
    """(linear_pack, linear_run) of linear.cpp."""
    native = library.load("linear")
    pointer, size, count = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    pack = native.linear_pack
    pack.argtypes, pack.restype = [pointer, size, size, pointer, count], None
    run = (pointer, size, size, size, pointer, size, pointer, count, pointer, count)
    return pack, Kernel(native, "linear_run", *run)
