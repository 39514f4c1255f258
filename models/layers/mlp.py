"""Feed-forward layers."""

import torch
from torch import nn

from mmserve.core.errors import ModelLoadError
from mmserve.models.layers.base import Placement
from mmserve.models.layers.linear import Linear, MergedLinear
from mmserve.models.ops.reference import ACTIVATIONS


class MLP(nn.Module):
    """``fc2(act(fc1(x)))``."""

    def __init__(self, width: int, hidden: int, outputs: int, act: str, place: Placement) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden, place, bias=True)
        self.fc2 = Linear(hidden, outputs, place, bias=True)
        self.act = act
        if act not in ACTIVATIONS:
            raise ModelLoadError(
                f"hidden_act {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}",
                param="hidden_act",
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x, self.act))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one matrix."""

    def __init__(self, width: int, hidden: int, place: Placement, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = MergedLinear(width, {"gate_proj": hidden, "up_proj": hidden}, place, bias=bias)
        self.down_proj = Linear(hidden, width, place, bias=bias)
        self.ops = place.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up(x)))
