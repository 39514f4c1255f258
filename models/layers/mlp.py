"""Feed-forward layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from mmserve.core.errors import ModelLoadError
from mmserve.models.layers.base import Placement
from mmserve.models.layers.linear import Linear, MergedLinear


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": F.silu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in ACTIVATIONS:
        raise ModelLoadError(
            f"hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}", param="hidden_act"
        )
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """``fc2(act(fc1(x)))``."""

    def __init__(self, width: int, hidden: int, outputs: int, act: str, place: Placement) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden, place, bias=True)
        self.fc2 = Linear(hidden, outputs, place, bias=True)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one matrix."""

    def __init__(self, width: int, hidden: int, place: Placement, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = MergedLinear(width, {"gate_proj": hidden, "up_proj": hidden}, place, bias=bias)
        self.down_proj = Linear(hidden, width, place, bias=bias)
        self.ops = place.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up(x)))
