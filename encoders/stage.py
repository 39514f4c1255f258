"""The encoder stage: turns vision items that nobody has encoded yet into features in the pool."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from mmserve.core.device import Device
from mmserve.core.errors import MMServeError
from mmserve.core.messages import VisionItem
from mmserve.encoders.graphs import EncoderGraphs
from mmserve.encoders.lane import Lane
from mmserve.encoders.parts import Resumable
from mmserve.encoders.pool import EmbeddingPool
from mmserve.models.forward import VisionEncoder

# Pixels are read-only, since requests share them, and the encoder only reads them. (Said once for the
# process: ``warnings.catch_warnings`` is not safe beside other threads.)
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(slots=True)
class _Batch:
    """What is being encoded: its items, which rows of each are kept (None: all), the room that the pool keeps
    for them, how far it is."""

    items: Sequence[VisionItem]
    kept: list[torch.Tensor | None]
    nbytes: int
    run: Resumable[list[torch.Tensor]]


class EncoderStage:
    """Batches items of many requests into single encoder forwards of bounded size, computed in slices.

    The engine's use, over as many steps as it takes:

        stage.begin(stage.next_batch(items wanted by waiting requests))
        while stage.items:                             # others get their turn in between
            stage.advance(work)
        features = stage.pool.acquire(item.digest)     # held until pool.release(item.digest)

    One batch is in work at a time, and its items are wanted until it is done: so a digest that several
    requests want is encoded once. ``token_bytes`` is what one vision token takes in the pool:
    (1 + D) * hidden * element size.

    On a GPU slices run in a stream of their own (``lane.py``) beside the steps of answers, which go first:
    ``advance`` launches one. When all of a batch is launched, or with ``paced`` each slice, there is nothing
    more to do until the device is done with it (``busy``). Features enter the pool when they are there, not
    before, so no step ever waits for a picture. ``collect`` is called once a step to see to that.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        budget_tokens: int,
        pool: EmbeddingPool,
        *,
        merge_size: int,
        token_bytes: int,
        device: Device | None = None,
        paced: bool = False,
    ) -> None:
        self.encoder = encoder
        self.budget_tokens = budget_tokens
        self.pool = pool
        self.merge_size = merge_size
        self.token_bytes = token_bytes
        self.encoded_items = 0
        self.encoded_tokens = 0
        self.slices = 0
        self.dropped_batches = 0
        self._batch: _Batch | None = None
        self._paced = paced
        self._lane = None if device is None or device.synchronous else Lane(device)

    def tokens(self, item: VisionItem) -> int:
        """Tokens of ``item``, the number it takes in the prompt and in the pool."""
        return self.cost(item) if item.kept is None else len(item.kept)

    def cost(self, item: VisionItem) -> int:
        """Merged tokens of its whole grid, which is what is encoded."""
        return item.grid[0] * item.grid[1] // self.merge_size**2

    def check(self, item: VisionItem) -> None:
        """MediaError when ``item`` can never fit into the pool; ask when a request arrives."""
        self.pool.check_size(self._nbytes(item))

    def missing(self, items: Iterable[VisionItem]) -> list[VisionItem]:
        """Those of ``items`` that are not in the pool, each digest once, in their order."""
        return list({i.digest: i for i in items if i.digest not in self.pool}.values())

    # ------------------------------------------------------------ what to encode next

    def next_batch(self, items: Iterable[VisionItem], spare: Iterable[bytes] = ()) -> list[VisionItem]:
        """The first of the missing ``items`` that one forward may take: within the token budget (a larger
        single item runs alone) and within what the pool can hold without dropping another of ``items`` or
        an entry of ``spare``."""
        wanted, spare = list(items), list(spare)
        room = self.pool.room_for([*(i.digest for i in wanted), *spare])
        budget = self.budget_tokens
        batch: list[VisionItem] = []
        for item in self.missing(wanted):
            budget -= self.cost(item)
            room -= self._nbytes(item)
            if room < 0 or (batch and budget < 0):
                break
            batch.append(item)
        if batch:
            for digest in spare:
                self.pool.touch(digest)  # the room for the batch is made of others
        return batch

    # ------------------------------------------------------------ the batch in work

    @property
    def items(self) -> Sequence[VisionItem]:
        """Those of the batch in work; none when there is none."""
        return self._batch.items if self._batch else ()

    def begin(self, items: Sequence[VisionItem]) -> None:
        """Put ``items`` in work, and keep room for them in the pool: errors as ``EmbeddingPool.put``."""
        assert self._batch is None, "one batch at a time"
        pixels = [_pixels(i) for i in items]
        kept = [None if i.kept is None else torch.tensor(i.kept, dtype=torch.long) for i in items]
        if self._lane is not None:
            pixels, kept = self._lane.upload(pixels), self._lane.upload(kept)
        run = Resumable(self.encoder.parts(pixels, [i.grid for i in items]))
        nbytes = sum(map(self._nbytes, items))
        self.pool.reserve(nbytes)
        self._batch = _Batch(items, kept, nbytes, run)

    def advance(self, work: float, seconds: float = inf) -> float:
        """Go on with the batch for about ``work`` floating-point operations, for no more than ``seconds`` of
        the host, and return how many that were.

        With the last slice its items become idle entries of the pool: acquire them before the next batch.
        After an error the batch is gone.
        """
        assert self._batch is not None, "nothing is in work"
        self.slices += 1
        try:
            if self._lane is not None:
                return self._lane.launch(lambda: self._advance(work, seconds))
            done = self._advance(work, seconds)
        except BaseException:
            self._end()
            raise
        if self._batch.run.done:
            self._keep()
        return done

    def _advance(self, work: float, seconds: float) -> float:
        """Whole features only leave here, so that what is cut off and copied is in order, too."""
        assert self._batch is not None
        batch = self._batch
        done = batch.run.advance(work, seconds)
        if batch.run.done:
            batch.run.result = list(map(_kept, batch.run.result, batch.kept))
        return done

    # ------------------------------------------------------------ beside a device

    def capture(self, graphs: EncoderGraphs) -> None:
        """Make ``graphs`` in the stream in which they will run."""
        assert self._lane is not None, "a device that captures computes beside its host"
        with self._lane.stream.use():
            graphs.prepare()

    @property
    def busy(self) -> bool:
        """Whether the device is at something on which the next thing to do waits."""
        if self._lane is None or not (self._paced or self._batch is None or self._batch.run.done):
            return False
        return self._lane.busy

    def collect(self) -> Sequence[tuple[float, float]]:
        """Keep the features of a batch that the device is done with. Operations and seconds of the slice that
        has ended since this was last asked."""
        if self._lane is None:
            return ()
        ended = self._lane.collect()
        if self._batch is not None and self._batch.run.done and not self._lane.busy:
            for features in self._batch.run.result:
                self._lane.share(features)
            self._keep()
        return ended

    def wait(self) -> None:
        """Until the device is done with all that was launched."""
        if self._lane is not None:
            self._lane.wait()

    def drop(self) -> None:
        """Nobody wants the batch in work any more. What the device does for it meanwhile is for nothing."""
        if self._batch:
            self.dropped_batches += 1
            self._end()

    def encode_batch(self, items: Sequence[VisionItem]) -> None:
        """``begin`` and ``advance`` to the end."""
        self.begin(items)
        self.advance(float("inf"))
        self.wait()
        self.collect()

    def encode(self, items: Sequence[VisionItem]) -> None:
        """Encode all missing ``items``, batch after batch (for callers that have nothing else to do)."""
        for item in items:
            self.check(item)
        while missing := self.missing(items):
            self.encode_batch(self.next_batch(missing) or missing[:1])

    def check_integrity(self) -> None:
        """AssertionError unless the pool is sound and keeps room for what is in work, and no more."""
        self.pool.check_integrity()
        reserved = self._batch.nbytes if self._batch else 0
        assert self.pool.reserved_bytes == reserved, (
            f"{self.pool.reserved_bytes} reserved, {reserved} in work"
        )

    def _end(self) -> None:
        assert self._batch is not None
        self.pool.unreserve(self._batch.nbytes)
        self._batch = None

    def _keep(self) -> None:
        """The batch is done: its features become entries of the pool."""
        assert self._batch is not None
        batch = self._batch
        self._end()
        for item, features in zip(batch.items, batch.run.result, strict=True):
            self.pool.put(item.digest, features)
            self.encoded_tokens += self.cost(item)
        self.encoded_items += len(batch.items)

    def _nbytes(self, item: VisionItem) -> int:
        return self.tokens(item) * self.token_bytes


def _pixels(item: VisionItem) -> torch.Tensor:
    if item.pixels is None:
        raise MMServeError(
            f"vision item {item.digest.hex()[:12]} has no pixels and is not in the encoder pool"
        )
    return torch.from_numpy(np.ascontiguousarray(item.pixels))


def _kept(features: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """``rows`` of ``features``, or all, in memory of their own: a view would keep a whole batch alive in the
    pool."""
    if rows is not None:
        return features[rows]
    if features.untyped_storage().nbytes() == features.nbytes:
        return features
    return features.clone()
