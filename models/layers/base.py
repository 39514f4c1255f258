"""What every layer shares: where it lives, which checkpoint tensors fill it, what happens after loading.

A layer's life: built with empty parameters → the loader copies each checkpoint tensor into the view
that ``slots`` gives for its name → ``prepare`` packs or folds the weights, after which the plain
parameters may be gone and only ``forward`` is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mmserve.models.ops.registry import LinearOp, Ops


@dataclass(frozen=True)
class Placement:
    """Where and how a model is built."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops

    @property
    def linear(self) -> LinearOp:
        """The form of the layers that are quantised if the model is."""
        return self.ops.quantized or self.ops.linear

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter that needs no gradient."""
        values = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(values, requires_grad=False)


class Layer(nn.Module):
    """Base of the layers that own parameters."""

    def slots(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, the view that it fills) of the tensors of this layer, which stands at ``path``."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter.data

    def prepare(self) -> None:
        """Called once, after all slots are filled."""


def slots(model: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint must give for ``model``, by name, with the view that it fills."""
    return {
        name: view
        for path, layer in model.named_modules()
        if isinstance(layer, Layer)
        for name, view in layer.slots(f"{prefix}.{path}")
    }


def prepare(model: nn.Module) -> None:
    """Pack and fold the loaded weights of ``model``, layer by layer."""
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.prepare()
