"""Which encoded items the running requests hold, on the engine's side of the embedding pool."""

import time
from collections.abc import Iterable, Iterator
from itertools import takewhile

import torch

from mmserve.core.messages import VisionItem
from mmserve.encoders.stage import EncoderStage
from mmserve.engine.scheduler.request import Request


class FeatureClaims:
    """``scheduler.features.Features`` over the pool of an ``EncoderStage``.

    items:      0 .. items_passed      .. items_held          .. end
                computed, given back   pinned: one reference   not encoded yet, or not
                                       in the pool for each    asked for
    pixels:     dropped                dropped                 here, or left out by a sender
                                                               who found the digest in the pool

    Pixels go when their features are pinned: they lie in memory that the preprocessing needs again.
    A request that gives up its pins (preempted, parked) is back at 0 without pixels, and so may find
    that an item it needs was evicted meanwhile, as may one that came without. Such a request is
    *parked*: it holds neither pages nor pins, so nobody can wait for it, keeps the tokens it has
    generated, and is queued again when its pixels are supplied (``PixelsWanted``). An item that came
    without pixels is not pinned on arrival: a queue of such requests could fill the pool, and those who
    run and wait for room in it could not end.
    """

    def __init__(self, stage: EncoderStage) -> None:
        self.stage = stage
        self.pool = stage.pool
        self._held: dict[str, dict[int, torch.Tensor]] = {}

    def encoded(self, item: VisionItem) -> bool:
        return item.digest in self.pool or any(item.digest == i.digest for i in self.stage.items)

    def cost(self, item: VisionItem) -> int:
        return self.stage.cost(item)

    def claim(self, request: Request) -> None:
        items = request.items
        while request.items_held < len(items):
            features = self.pool.acquire(items[request.items_held].digest)
            if features is None:
                request.ready_len = items[request.items_held].span[0]
                return
            self._held.setdefault(request.request_id, {})[request.items_held] = features
            request.drop_pixels(request.items_held)
            request.items_held += 1
        request.ready_len = request.num_tokens
        if items and request.encoded is None:
            request.encoded = time.monotonic()

    def release_computed(self, request: Request) -> None:
        while (
            request.items_passed < request.items_held
            and request.items[request.items_passed].span[1] <= request.computed_len
        ):
            self._give_back(request)

    def release(self, request: Request) -> None:
        while request.items_passed < request.items_held:
            self._give_back(request)
        request.items_passed = request.items_held = 0
        self._held.pop(request.request_id, None)

    def coming(self, requests: Iterable[Request]) -> Iterator[bytes]:
        """Encoded items that ``requests`` can pin in their next turn: none before them is missing."""
        for request in requests:
            digests = (item.digest for item in request.items[request.items_held :])
            yield from takewhile(self.pool.__contains__, digests)

    def features(self, request: Request, index: int) -> torch.Tensor:
        """[tokens, 1 + D, hidden] of item ``index``, which the request holds."""
        return self._held[request.request_id][index]

    def _give_back(self, request: Request) -> None:
        index = request.items_passed
        del self._held[request.request_id][index]
        self.pool.release(request.items[index].digest)
        request.items_passed += 1
