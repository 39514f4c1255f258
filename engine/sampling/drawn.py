"""Tokens that were drawn, as they stand on the device and as the host will know them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmserve.core.messages import TokenLogprob

Sampled = tuple[int, TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class Drawn:
    """``ids`` int64 [R] on the device, NO_TOKEN where none is allowed. ``results`` makes one (token,
    log-probability if asked for) for each row of what ``copies`` are on the host."""

    ids: torch.Tensor
    copies: Sequence[torch.Tensor]
    results: Callable[..., list[Sampled]]


def on_device(ids: torch.Tensor) -> Drawn:
    """Tokens that the host does not know yet, and nothing beside them."""
    return Drawn(ids, (ids,), _plain)


def on_host(tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], device: torch.device) -> Drawn:
    """Tokens that the host knows."""
    sampled = list(zip(tokens, logprobs, strict=True))
    ids = torch.from_numpy(np.array(tokens, np.int64)).to(device)
    return Drawn(ids, (), lambda: sampled)


def _plain(tokens: npt.NDArray[Any]) -> list[Sampled]:
    return [(token, None) for token in tokens.tolist()]
