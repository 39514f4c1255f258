"""Normalisation layers."""

from collections.abc import Iterator

import torch

from mmserve.models.layers.base import Layer, Placement


class RMSNorm(Layer):
    def __init__(self, width: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(width)
        self.eps = eps
        self.ops = place.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of ``residual + x``, the sum); ``residual`` is given up."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class HeadNorm(Layer):
    """Weights of the RMS norm of each query and key head over its own dimension."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, place: Placement) -> None:
        super().__init__()
        self.q_norm = place.empty(head_dim)
        self.k_norm = place.empty(head_dim)
        self.counts = (heads, kv_heads)
        self.weight = torch.empty(0)

    def slots(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        parent = path.rpartition(".")[0]
        yield f"{parent}.q_norm.weight", self.q_norm.data
        yield f"{parent}.k_norm.weight", self.k_norm.data

    def prepare(self) -> None:
        """``weight`` [heads + kv_heads, head_dim], query heads first."""
        heads, kv_heads = self.counts
        self.weight = torch.cat([self.q_norm.expand(heads, -1), self.k_norm.expand(kv_heads, -1)])


class LayerNorm(Layer):
    def __init__(self, width: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(width)
        self.bias = place.empty(width)
        self.eps = eps
        self.ops = place.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)
