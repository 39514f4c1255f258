"""Which form of each operation runs on a device. The plain torch form always exists."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch

from mmserve.core.errors import ConfigError
from mmserve.models.ops import cpu, reference
from mmserve.models.ops.native.int8 import NativeInt8Linear
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.linear import NativeLinear
from mmserve.models.ops.native.ops import SUFFIXES, native_ops
from mmserve.models.ops.quantized import PlainInt8Linear
from mmserve.models.ops.triton import runtime

log = logging.getLogger(__name__)

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
LayerNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Rotate = Callable[[torch.Tensor, int, torch.Tensor | None, float, torch.Tensor, torch.Tensor], None]
Scatter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class LinearOp(Protocol):
    """``pack`` a weight [out, in] once, then call with what it returned, a type of the operation's own."""

    name: str

    def pack(self, weight: torch.Tensor) -> Any: ...

    def __call__(
        self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, act: str | None = None
    ) -> torch.Tensor:
        """``act(x @ weight.T + bias)``; ``act`` is a key of ``reference.ACTIVATIONS`` or None."""


class QuantizedLinearOp(LinearOp, Protocol):
    """A linear layer that keeps its weights in fewer bits than the model's dtype has."""

    def rows(self, weight: Any, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``ids`` int64 [T] of what ``pack`` returned, [T, in] in ``dtype``."""


class RotateStore(Protocol):
    def __call__(
        self,
        heads: torch.Tensor,
        split: tuple[int, int, int],
        weight: torch.Tensor | None,
        eps: float,
        tables: tuple[torch.Tensor, torch.Tensor],
        pool: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> None:
        """See ``reference.rotate_store``."""


class MRopeTable(Protocol):
    def __call__(
        self, positions: torch.Tensor, frequencies: torch.Tensor, axes: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``reference.mrope``."""


class EmbedPatches(Protocol):
    def __call__(
        self,
        pixels: torch.Tensor,
        grid: tuple[int, int],
        merge: int,
        weight: torch.Tensor,
        bias: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Embed uint8 [frames, H, W, C] of (h, w) patches into ``out`` [h * w, hidden], by the folded weight
        [hidden, frames * patch * patch * C] and bias [hidden] of ``encoders/patch_embed.py``."""


@dataclass(frozen=True)
class Ops:
    """The chosen form of each operation; ``names`` tells which, ``linear_why`` why that linear layer.

    ``quantized`` takes the place of ``linear`` in all layers but the patch embedding, if it is there. Without
    ``embed_patches``, patches are cut by torch and embedded by ``linear``.
    """

    rms_norm: Norm
    add_rms_norm: AddNorm
    layer_norm: LayerNorm
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    rotate_heads: Rotate
    rotate_store: RotateStore
    mrope: MRopeTable
    scatter_rows: Scatter
    scatter_add_rows: Scatter
    embed_patches: EmbedPatches | None
    linear: LinearOp
    names: Mapping[str, str]
    linear_why: str = "asked for"
    quantized: QuantizedLinearOp | None = None


_FORMS: dict[str, dict[str, Callable | None]] = {
    "rms_norm": {"torch": reference.rms_norm, "cpu": cpu.rms_norm},
    "add_rms_norm": {"torch": reference.add_rms_norm, "cpu": cpu.add_rms_norm},
    "layer_norm": {"torch": reference.layer_norm},
    "silu_and_mul": {"torch": reference.silu_and_mul},
    "rotate_heads": {"torch": reference.rotate_heads, "cpu": cpu.rotate_heads},
    "rotate_store": {"torch": reference.rotate_store},
    "mrope": {"torch": reference.mrope},
    "scatter_rows": {"torch": reference.scatter_rows},
    "scatter_add_rows": {"torch": reference.scatter_add_rows},
    "embed_patches": {"torch": None},
}
# The form "native" of some of them is a method of ``NativeOps``; the form "triton" of all is a function in a
# module of ``models/ops/triton``.
_NATIVE_OPS = (
    *("rms_norm", "add_rms_norm", "layer_norm", "silu_and_mul", "rotate_heads"),
    *("scatter_rows", "scatter_add_rows"),
)
_TRITON_OPS = {
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "layer_norm": "norms",
    "silu_and_mul": "activations",
    "rotate_heads": "rotary_kv",
    "rotate_store": "rotary_kv",
    "mrope": "rotary_kv",
    "scatter_rows": "scatter",
    "scatter_add_rows": "scatter",
    "embed_patches": "patches",
}
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ONEDNN = cpu.OneDNNLinear()
_NATIVE = NativeLinear()
_CPU_LINEAR: dict[str, cpu.OneDNNLinear | NativeLinear] = {"onednn": _ONEDNN, "native": _NATIVE}


def reference_ops() -> Ops:
    """The oracle: every operation in its plain torch form."""
    return _ops(dict.fromkeys(_FORMS, "torch"), reference.PlainLinear(), "asked for")


def triton_ops() -> Ops:
    """Every operation as a Triton kernel, with torch's matrix products. ImportError without Triton."""
    return _ops(dict.fromkeys(_FORMS, "triton"), reference.PlainLinear(), "asked for")


def choose_ops(
    device: torch.device, dtype: torch.dtype, linear: str = "auto", quantization: str = "none"
) -> Ops:
    """The fastest usable forms on ``device`` in ``dtype``.

    ``linear``: auto, onednn, native or plain; ``quantization``: none or int8. ConfigError when onednn, native
    or int8 is demanded and cannot run.
    """
    chosen, why = _linear(device, dtype, linear)
    ops = _ops(_small(device, dtype), chosen, why)
    if quantization == "none":
        log.info("linear layers run as %s: %s", chosen.name, why)
        return ops
    quantized, quantized_why = _int8(device)
    log.info("linear layers run as %s: %s; patch embedding as %s", quantized.name, quantized_why, chosen.name)
    names = {**ops.names, "linear": quantized.name, "patch_embedding": chosen.name}
    return replace(ops, names=names, linear_why=quantized_why, quantized=quantized)


def native_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels in C++ cannot run the small operations here; None when they can."""
    if device.type != "cpu":
        return "they run on a CPU only"
    if dtype not in SUFFIXES:
        return f"they do not compute {dtype}"
    try:
        native_ops()
    except NativeUnavailable as error:
        return str(error)
    return None


def triton_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot run the operations here; None when they can."""
    if device.type != "cuda":
        return "they run on a GPU only"
    return f"they do not compute {dtype}" if dtype not in _TRITON_DTYPES else runtime.unusable(device)


def _small(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The form of each operation beside the linear layers."""
    plain = {op: device.type if device.type in forms else "torch" for op, forms in _FORMS.items()}
    if device.type == "cpu":
        reason, fast = native_unusable(device, dtype), dict.fromkeys(_NATIVE_OPS, "native")
    else:
        reason, fast = triton_unusable(device, dtype), dict.fromkeys(_FORMS, "triton")
    if reason is None:
        return plain | fast
    kernels = "C++" if device.type == "cpu" else "Triton"
    log.warning(
        "norms, activations and rotary positions run in torch; in %s they cannot: %s", kernels, reason
    )
    return plain


def _linear(device: torch.device, dtype: torch.dtype, wanted: str) -> tuple[LinearOp, str]:
    """The linear layer and why it is that one."""
    if wanted == "plain":
        return reference.PlainLinear(), "asked for"
    if wanted in _CPU_LINEAR:
        return _demanded(device, dtype, wanted), "asked for"
    if device.type != "cpu":
        return reference.PlainLinear(), "the device's own matrix products"
    return _fastest_on_cpu(dtype)


def _demanded(device: torch.device, dtype: torch.dtype, wanted: str) -> LinearOp:
    linear = _CPU_LINEAR[wanted]
    reason = "it runs on a CPU only" if device.type != "cpu" else linear.unusable(dtype)
    if reason is not None:
        raise ConfigError(f"linear_backend {wanted} cannot run: {reason}", param="linear_backend")
    return linear


def _fastest_on_cpu(dtype: torch.dtype) -> tuple[LinearOp, str]:
    """The first that can run of those that are worth trying here; the reason names those that could not."""
    instructions = cpu.bf16_instructions()
    missed: list[str] = []
    for name, why in _worth_trying(dtype, instructions):
        reason = _CPU_LINEAR[name].unusable(dtype)
        if reason is None:
            return _CPU_LINEAR[name], "; ".join((*missed, why))
        missed.append(f"{name} cannot run: {reason}")
        log.warning("linear layers run slower than they could; %s", missed[-1])
    return reference.PlainLinear(), "; ".join(missed)


def _worth_trying(dtype: torch.dtype, instructions: str | None) -> tuple[tuple[str, str], ...]:
    """(linear layer, why), the fastest first."""
    packed = "weights laid out for oneDNN beforehand are read fastest on a CPU"
    if dtype != torch.bfloat16:
        return (("onednn", packed),)
    widened = "this CPU shows no bf16 instructions: bf16 weights are widened on their way into float32 sums"
    if instructions is None:
        return (("native", widened), ("onednn", packed))
    own = f"this CPU multiplies bf16 itself ({instructions})"
    if instructions == "avx512_bf16" and _NATIVE.multiplies_bf16:
        return (("native", f"{own}, and reads few rows' weights faster so than oneDNN"), ("onednn", own))
    return (("onednn", own), ("native", "bf16 weights are widened on their way into float32 sums"))


def _int8(device: torch.device) -> tuple[QuantizedLinearOp, str]:
    if device.type != "cpu":
        raise ConfigError(
            f"quantization int8 runs on a CPU only so far, not on {device.type}; allowed there: none",
            param="quantization",
        )
    try:
        return NativeInt8Linear(), "asked for by quantization"
    except NativeUnavailable as error:
        log.warning("int8 linear layers run in plain torch, slower than no quantization: %s", error)
        return PlainInt8Linear(), f"asked for by quantization; the native form cannot run: {error}"


def _ops(names: dict[str, str], linear: LinearOp, why: str) -> Ops:
    chosen: dict[str, Any] = {op: _form(op, name) for op, name in names.items()}
    return Ops(**chosen, linear=linear, names={**names, "linear": linear.name}, linear_why=why)


def _form(op: str, name: str) -> Callable | None:
    if name == "native":
        return getattr(native_ops(), op)
    if name == "triton":
        return getattr(import_module(f"mmserve.models.ops.triton.{_TRITON_OPS[op]}"), op)
    return _FORMS[op][name]
