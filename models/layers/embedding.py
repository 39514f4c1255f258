"""Token embeddings and the head that turns hidden rows into logits."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from mmserve.models.layers.base import Layer, Placement
from mmserve.models.layers.linear import Linear


class Embedding(Layer):
    """Rows of a matrix, or of the quantised one that a tied head keeps in its stead."""

    def __init__(self, count: int, width: int, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(count, width)
        self.rows: Callable[[torch.Tensor], torch.Tensor] = self._own_rows

    def read_from(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give up the matrix: from now on ``rows`` makes [T, width] of ids int64 [T]."""
        self.rows = rows
        del self.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)

    def _own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class TiedHead(Layer):
    """Logits by the embedding's own matrix.

    Where the linear operation packs its weights there are two copies of it: rows to look up, and the
    packed form that makes the largest product of every decode step fast. A quantised one is the only copy.
    """

    def __init__(self, embedding: Embedding, place: Placement) -> None:
        super().__init__()
        self.linear = place.linear
        self.place = place
        self.embedding = embedding
        self.packed = None

    def prepare(self) -> None:
        self.packed = self.linear.pack(self.embedding.weight.data)
        if quantized := self.place.ops.quantized:
            self.embedding.read_from(partial(quantized.rows, self.packed, dtype=self.place.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.packed, None)


def head(embedding: Embedding, tied: bool, place: Placement) -> TiedHead | Linear:
    """The output head of a decoder: the embedding's matrix or one of its own."""
    count, width = embedding.weight.shape
    return TiedHead(embedding, place) if tied else Linear(width, count, place)
