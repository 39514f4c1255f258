"""Which form of each operation runs on a device. The plain torch form always exists."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mmserve.core.errors import ConfigError
from mmserve.models.ops import cpu, reference

log = logging.getLogger(__name__)

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
Rope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LinearOp(Protocol):
    """``pack`` a weight [out, in] once, then call with what it returned."""

    name: str

    def pack(self, weight: torch.Tensor) -> torch.Tensor: ...

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str | None = None
    ) -> torch.Tensor:
        """``act(x @ weight.T + bias)``; ``act`` is a key of ``reference.ACTIVATIONS`` or None."""


@dataclass(frozen=True)
class Ops:
    """The chosen form of each operation; ``names`` tells which."""

    rms_norm: Norm
    add_rms_norm: AddNorm
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    rope: Rope
    linear: LinearOp
    names: Mapping[str, str]


_FORMS: dict[str, dict[str, Callable]] = {
    "rms_norm": {"torch": reference.rms_norm, "cpu": cpu.rms_norm},
    "add_rms_norm": {"torch": reference.add_rms_norm, "cpu": cpu.add_rms_norm},
    "silu_and_mul": {"torch": reference.silu_and_mul},
    "rope": {"torch": reference.rope, "cpu": cpu.rope},
}
_ONEDNN = cpu.OneDNNLinear()


def reference_ops() -> Ops:
    """The oracle: every operation in its plain torch form."""
    return _ops(dict.fromkeys(_FORMS, "torch"), reference.PlainLinear())


def choose_ops(device: torch.device, dtype: torch.dtype, linear: str = "auto") -> Ops:
    """The fastest usable forms on ``device`` in ``dtype``.

    ``linear``: auto, onednn or plain. ConfigError when onednn is demanded and cannot run.
    """
    names = {op: device.type if device.type in forms else "torch" for op, forms in _FORMS.items()}
    return _ops(names, _linear(device, dtype, linear))


def _linear(device: torch.device, dtype: torch.dtype, wanted: str) -> LinearOp:
    if wanted == "plain":
        return reference.PlainLinear()
    reason = "it runs on a CPU only" if device.type != "cpu" else _ONEDNN.unusable(dtype)
    if reason is None:
        return _ONEDNN
    if wanted == "onednn":
        raise ConfigError(f"linear_backend onednn cannot run: {reason}", param="linear_backend")
    if device.type == "cpu":
        log.warning("linear layers run in their plain form; onednn cannot run: %s", reason)
    return reference.PlainLinear()


def _ops(names: dict[str, str], linear: LinearOp) -> Ops:
    chosen = {op: _FORMS[op][name] for op, name in names.items()}
    return Ops(**chosen, linear=linear, names={**names, "linear": linear.name})
