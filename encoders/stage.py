"""The encoder stage: turns vision items that nobody has encoded yet into features in the pool."""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from mmserve.core.errors import MMServeError
from mmserve.core.messages import VisionItem
from mmserve.encoders.pool import EmbeddingPool
from mmserve.models.forward import VisionEncoder

# Pixels are read-only, since requests share them, and the encoder only reads them. (Said once for the
# process: ``warnings.catch_warnings`` is not safe beside other threads.)
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class EncoderStage:
    """Batches items of many requests into single encoder forwards of bounded size.

    The engine's use, once a step:

        batch = stage.next_batch(items wanted by waiting requests)
        if batch:
            stage.encode_batch(batch)
        features = stage.pool.acquire(item.digest)     # held until pool.release(item.digest)

    A digest that several requests want is encoded once. ``token_bytes`` is what one vision token
    takes in the pool: (1 + D) * hidden * element size.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        budget_tokens: int,
        pool: EmbeddingPool,
        *,
        merge_size: int,
        token_bytes: int,
    ) -> None:
        self.encoder = encoder
        self.budget_tokens = budget_tokens
        self.pool = pool
        self.merge_size = merge_size
        self.token_bytes = token_bytes
        self.encoded_items = 0
        self.encoded_tokens = 0

    def tokens(self, item: VisionItem) -> int:
        """Merged tokens of ``item``, the number it takes in the prompt."""
        return item.grid[0] * item.grid[1] // self.merge_size**2

    def check(self, item: VisionItem) -> None:
        """MediaError when ``item`` can never fit into the pool; ask when a request arrives."""
        self.pool.check_size(self._nbytes(item))

    def missing(self, items: Iterable[VisionItem]) -> list[VisionItem]:
        """Those of ``items`` that are not in the pool, each digest once, in their order."""
        return list({i.digest: i for i in items if i.digest not in self.pool}.values())

    def next_batch(self, items: Iterable[VisionItem]) -> list[VisionItem]:
        """The first of the missing ``items`` that one forward may take: within the token budget (a larger
        single item runs alone) and within what the pool can hold without dropping another of ``items``."""
        wanted = list(items)
        room = self.pool.room_for(i.digest for i in wanted)
        budget = self.budget_tokens
        batch: list[VisionItem] = []
        for item in self.missing(wanted):
            budget -= self.tokens(item)
            room -= self._nbytes(item)
            if room < 0 or (batch and budget < 0):
                break
            batch.append(item)
        return batch

    def encode_batch(self, items: Sequence[VisionItem]) -> None:
        """One forward over ``items``; the results are idle entries of the pool afterwards.

        Acquire them before the next batch. MediaError or PoolFull as ``EmbeddingPool.put``.
        """
        if not items:
            return
        features = self.encoder.forward([_pixels(i) for i in items], [i.grid for i in items])
        for item, result in zip(items, features, strict=True):
            self.pool.put(item.digest, _owned(result))
            self.encoded_tokens += result.shape[0]
        self.encoded_items += len(items)

    def encode(self, items: Sequence[VisionItem]) -> None:
        """Encode all missing ``items``, batch after batch (for callers that have nothing else to do)."""
        for item in items:
            self.check(item)
        while missing := self.missing(items):
            self.encode_batch(self.next_batch(missing) or missing[:1])

    def _nbytes(self, item: VisionItem) -> int:
        return self.tokens(item) * self.token_bytes


def _pixels(item: VisionItem) -> torch.Tensor:
    if item.pixels is None:
        raise MMServeError(
            f"vision item {item.digest.hex()[:12]} has no pixels and is not in the encoder pool"
        )
    return torch.from_numpy(np.ascontiguousarray(item.pixels))


def _owned(features: torch.Tensor) -> torch.Tensor:
    """``features`` in memory of their own: a view would keep the whole batch alive in the pool."""
    if features.untyped_storage().nbytes() == features.nbytes:
        return features
    return features.clone()
