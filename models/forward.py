"""The seam between a language model and whoever runs it: everything a forward needs is an argument."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, cast

import torch


class Attention(Protocol):
    """Causal attention over the paged KV cache of one planned batch (DESIGN section 7)."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Store ``k, v`` [T, kv_heads, head_dim] of ``layer`` and attend with ``q`` [T, heads, head_dim].

        All three may be strided views. Scale is ``head_dim ** -0.5``. Query row t of a request sees that
        request's tokens up to and including t. Returns [T, heads, head_dim].
        """


class StoringAttention(Attention, Protocol):
    """An ``Attention`` whose keys and values may be stored by whoever rotates the keys anyway:
    ``forward`` is to put ``k, v`` where ``kv_slots`` says, and then to ``attend``."""

    stores_fused: bool

    def kv_slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(keys, values, slots) of the planned batch: two of [kv_heads, slots, head_dim], and where in them
        each row goes, int [T], negative for rows that are not kept."""

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """What ``forward`` does when ``k, v`` are stored."""


def storing(attention: Attention) -> StoringAttention | None:
    """``attention`` if its keys and values may be stored for it."""
    return cast(StoringAttention, attention) if getattr(attention, "stores_fused", False) else None


@dataclass(frozen=True, slots=True)
class VisionRows:
    """Encoder output for the rows of this step that stand under vision items.

    ``rows`` int64 [V] index the step's T tokens; ``features`` is [V, 1 + D, hidden]: the merged token,
    then D deepstack features (D = 0 where the family has none), in the model's dtype.
    """

    rows: torch.Tensor
    features: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step's tokens of all scheduled requests, flattened: request after request.

    ``token_ids`` int64 [T]; ``positions`` int64 [3, T] (temporal, height, width);
    ``logit_rows`` int64 [R]: the rows whose next-token logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    attention: Attention
    vision: VisionRows | None = None


class LanguageModel(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, inputs: ForwardInput) -> torch.Tensor:
        """Logits [R, vocab] of ``inputs.logit_rows`` in the model's dtype."""


class VisionEncoder(Protocol):
    """What the encoder stage needs of a vision transformer."""

    def forward(self, pixels: list[torch.Tensor], grids: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Encode items of any sizes in one variable-length batch.

        ``pixels[i]`` is uint8 [frames, H, W, 3], frames 1 (a still) or 2; ``grids[i]`` its (h, w) in
        patches. Returns per item [h * w / merge**2, 1 + D, hidden] (see ``VisionRows.features``).
        """

    def parts(
        self, pixels: list[torch.Tensor], grids: list[tuple[int, int]]
    ) -> Generator[float, None, list[torch.Tensor]]:
        """``forward`` in bounded parts, for whoever has other things to do between them: each yields the
        floating-point operations that it was, and the features are returned at the end."""
