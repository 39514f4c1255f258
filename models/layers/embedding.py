"""Token embeddings and the head that turns hidden rows into logits."""

import torch
import torch.nn.functional as F

from mmserve.models.layers.base import Layer, Placement
from mmserve.models.layers.linear import Linear


class Embedding(Layer):
    def __init__(self, count: int, width: int, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(count, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class TiedHead(Layer):
    """Logits by the embedding's own matrix.

    Where the linear operation packs its weights there are two copies of it: rows to look up, and the
    packed form that makes the largest product of every decode step fast.
    """

    def __init__(self, embedding: Embedding, place: Placement) -> None:
        super().__init__()
        self.linear = place.ops.linear
        self.packed = embedding.weight.data

    def prepare(self) -> None:
        self.packed = self.linear.pack(self.packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.packed, None)


def head(embedding: Embedding, tied: bool, place: Placement) -> TiedHead | Linear:
    """The output head of a decoder: the embedding's matrix or one of its own."""
    count, width = embedding.weight.shape
    return TiedHead(embedding, place) if tied else Linear(width, count, place)
