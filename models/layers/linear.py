"""Linear layers, alone or several merged into one matrix."""

from collections.abc import Iterator

import torch

from mmserve.models.layers.base import Layer, Placement


class Linear(Layer):
    """[..., in] -> [..., out]. After ``prepare`` the weight exists only as the operation packs it."""

    def __init__(self, inputs: int, outputs: int, place: Placement, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = place.empty(outputs, inputs)
        self.bias = place.empty(outputs) if bias else None
        self.linear = place.linear
        self.packed = self.weight.data

    def prepare(self) -> None:
        self.packed = self.linear.pack(self.weight.data)
        del self.weight

    def forward(self, x: torch.Tensor, act: str | None = None) -> torch.Tensor:
        return self.linear(x, self.packed, self.bias, act)


class MergedLinear(Linear):
    """Several linear layers over one input, their outputs side by side in the order of ``parts``.

    ``parts`` maps each one's checkpoint name, a sibling of this layer's own, to its width.
    """

    def __init__(self, inputs: int, parts: dict[str, int], place: Placement, *, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), place, bias=bias)
        self.parts = parts

    def slots(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        parent = path.rpartition(".")[0]
        for name, parameter in self.named_parameters(recurse=False):
            for part, view in zip(self.parts, parameter.data.split(list(self.parts.values())), strict=True):
                yield f"{parent}.{part}.{name}", view
