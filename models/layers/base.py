"""What every layer shares: where it lives, which checkpoint tensors fill it, what happens after loading.

A layer's life: built with empty parameters → the loader copies each checkpoint tensor into the view
that ``slots`` gives for its name → ``prepare`` packs or folds the weights as soon as the last of them is
there, after which the plain parameters may be gone and only ``forward`` is left. So loading holds the packed
form of the layers that came and the plain one of those that are coming, never both of all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
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


class Filling:
    """The tensors that a checkpoint must give for some models, and who is prepared when they have come.

    ``views``: name -> the view to fill. ``filled`` empties it, so that nothing holds what a layer gives up
    when it is prepared.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """``models`` by the prefix of their names."""
        layers = [
            (f"{prefix}.{path}", layer)
            for prefix, model in models.items()
            for path, layer in model.named_modules()
            if isinstance(layer, Layer)
        ]
        self.views: dict[str, torch.Tensor] = {}
        self._owner: dict[str, Layer] = {}
        self._awaited: Counter[Layer] = Counter()
        for path, layer in layers:
            found = dict(layer.slots(path))
            self.views |= found
            self._owner |= dict.fromkeys(found, layer)
            self._awaited[layer] = len(found)

    def filled(self, name: str) -> None:
        """The view of ``name`` holds its tensor: it is dropped, and its layer prepared if it was the last."""
        del self.views[name]
        layer = self._owner[name]
        self._awaited[layer] -= 1
        if not self._awaited[layer]:
            layer.prepare()
            del self._awaited[layer]

    def finish(self) -> None:
        """Prepare the layers that have no tensors of their own, now that all others are ready."""
        assert not self.views, "every tensor has come"
        for layer in self._awaited:
            layer.prepare()
