"""Where every request for preprocessing comes by: answered early if it can be, and by the workers if not."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from mmserve.core.errors import DeadlineExceeded, MediaTimeout, MMServeError, Overloaded
from mmserve.core.messages import ChatInput, VideoPart
from mmserve.core.metrics import MediaOutcome, Metrics
from mmserve.preprocess.cache import EarlyAnswers, Pixels, part_digest
from mmserve.preprocess.flights import Flights
from mmserve.preprocess.media import Kind, MediaPart, Medium, check_text, media_parts, without_pixels
from mmserve.preprocess.prompt import Prepared
from mmserve.preprocess.workers import Workers

LARGE = 1 << 20  # bytes; reading more than that is not for an event loop


class PrepareDesk:
    """Stands in front of ``workers``. It may be called from any event loop, also from several.

    ``holds(digest)`` says whether the encoder has an item's features at this moment; where it has all of a
    part's, the part goes to the engine without pixels. It may have dropped them by the time they are needed:
    the engine then asks for ``pixels``.
    """

    def __init__(
        self,
        workers: Workers,
        answers: EarlyAnswers,
        holds: Callable[[bytes], bool],
        metrics: Metrics,
        *,
        max_items: int,
        max_text_chars: int,
    ) -> None:
        self.workers = workers
        self.answers = answers
        self.holds = holds
        self.metrics = metrics
        self.max_items = max_items
        self.max_text_chars = max_text_chars
        self.expired = 0  # requests whose deadline passed here
        self._flights: Flights[Medium] = Flights()

    # ------------------------------------------------------------ what is asked

    async def prepare(self, chat: ChatInput) -> Prepared:
        """All that the engine needs. InvalidRequest or MediaError names the part that is wrong; Overloaded
        when too much waits already, DeadlineExceeded past the deadline of ``chat``."""
        check_text(chat, self.max_text_chars)
        try:
            media = await self._look_at_all(chat, media_parts(chat, self.max_items), whole=False)
            prepared = await self.workers.assemble(chat, media)
        except MMServeError as error:
            if not _came_late(error, chat.deadline):
                raise
            self.expired += 1
            raise DeadlineExceeded(f"{error.param}: {error.message}", param="deadline_ms") from None
        self.metrics.stages(prepared.stages)
        return prepared

    async def look(self, part: MediaPart) -> Medium:
        """What one part becomes; without its pixels where the encoder has it."""
        return await self._look(part, whole=False)

    async def pixels(
        self, chat: ChatInput, digests: Sequence[Sequence[bytes]], wanted: frozenset[bytes]
    ) -> dict[bytes, Pixels]:
        """The pixels of the pictures and clips of ``chat`` that show any of ``wanted``, by digest, decoded
        again where they were not kept. ``digests`` are those of ``Prepared``."""
        parts = zip(media_parts(chat, self.max_items), digests, strict=True)
        showing = [part for part, own in parts if not wanted.isdisjoint(own)]
        return _by_digest(await self._look_at_all(chat, showing, whole=True))

    async def glance(self, data: bytes, request: object) -> np.ndarray:
        """The luma thumbnail of an encoded picture, uint8 [h, w]. MediaError where it cannot be read."""
        return await self.workers.glance(data, request=request)

    async def pixels_of(self, parts: Iterable[MediaPart]) -> dict[bytes, Pixels]:
        """The pixels of all items of ``parts`` by digest, decoded again where they were not kept."""
        return _by_digest(await _together(self._look(part, whole=True) for part in parts))

    def encoded(self, digests: Iterable[bytes]) -> None:
        """The encoder has had these items: nobody needs their pixels for now."""
        self.answers.drop_pixels(digests)

    def stats(self) -> dict[str, Any]:
        return {
            **self.workers.stats(),
            **self.answers.stats(),
            "media_in_flight": len(self._flights),
            "media_shared": self._flights.shared,
        }

    async def close(self) -> None:
        """End the workers; calls under way fail."""
        await self.workers.close()

    # ------------------------------------------------------------ one part

    async def _look(
        self, part: MediaPart, *, whole: bool, request: str | None = None, deadline: float | None = None
    ) -> Medium:
        """``part`` seen, if need be by the workers; errors carry its ``param``. ``whole`` asks for pixels
        also where the encoder has the item."""
        kind: Kind = "video" if isinstance(part, VideoPart) else "image"
        try:
            async with _until(deadline):
                medium, outcome = await self._answer(part, whole, request)
        except MMServeError as error:
            self.metrics.media(kind, "refused" if error.status < 500 else "failed")
            raise _named(error, part.param) from None
        self.metrics.media(kind, outcome)
        return medium

    async def _answer(self, part: MediaPart, whole: bool, request: str | None) -> tuple[Medium, MediaOutcome]:
        key = await _key(part)
        known = self.answers.find(key)
        if known is not None and (pixels := self._pixels_for(known, whole)) is not None:
            return _recalled(known, pixels), "cached"
        medium, joined = await self._flights.join(key, lambda: self._see(key, part, request))
        if joined:
            medium = _recalled(medium, medium.pixels)
        if not whole and self._held(medium):
            medium = without_pixels(medium)
        return medium, "cached" if joined else "decoded"

    async def _see(self, key: bytes, part: MediaPart, request: str | None) -> Medium:
        """For whoever waits for ``key``: so without the place where one of them has the part, and without
        the deadline of one."""
        medium = await self.workers.see(structs.replace(part, param=None), request=request)
        if not _of_a_series(part):
            self.answers.keep(key, medium, pixels=not self._held(medium))
        self.metrics.stages(medium.stages)
        return medium

    def _pixels_for(self, known: Medium, whole: bool) -> tuple[Pixels | None, ...] | None:
        """The pixels of ``known``, all of them None where the encoder has the items; None if any are gone."""
        if not whole and self._held(known):
            return known.pixels
        return self.answers.pixels(known.digests)

    def _held(self, medium: Medium) -> bool:
        return all(map(self.holds, medium.digests))

    # ------------------------------------------------------------ several parts of a request

    async def _look_at_all(
        self, chat: ChatInput, parts: Iterable[MediaPart], *, whole: bool
    ) -> Sequence[Medium]:
        return await _together(
            self._look(part, whole=whole, request=chat.request_id, deadline=chat.deadline) for part in parts
        )


def _by_digest(media: Iterable[Medium]) -> dict[bytes, Pixels]:
    return {
        digest: pixels
        for medium in media
        for digest, pixels in zip(medium.digests, medium.pixels, strict=True)
        if pixels is not None
    }


async def _together(jobs: Iterable[Coroutine[Any, Any, Medium]]) -> Sequence[Medium]:
    """The results of all ``jobs``; the first error gives up the others and is raised when they ended."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)
        del tasks  # an error holds this frame, and its task the error: no ring may keep a request's bytes


async def _end(tasks: Sequence[asyncio.Task[Medium]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _key(part: MediaPart) -> bytes:
    return part_digest(part) if _size(part) <= LARGE else await asyncio.to_thread(part_digest, part)


def _size(part: MediaPart) -> int:
    """Bytes of what ``part`` brings."""
    values = [getattr(part, name) for name in part.__struct_fields__]
    return sum(_nbytes(value) for value in values)


def _nbytes(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_nbytes, value))
    return len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)


def _of_a_series(part: MediaPart) -> bool:
    """Whether ``part`` goes on from a camera's frame before it: nobody brings the same once more."""
    return isinstance(part, VideoPart) and part.reference is not None


def _recalled(medium: Medium, pixels: tuple[Pixels | None, ...]) -> Medium:
    """``medium`` for a request that did not cost any of its stages."""
    return replace(medium, pixels=pixels, seen=replace(medium.seen, cached=True), stages={})


def _named(error: MMServeError, param: str | None) -> MMServeError:
    """An error of one's own: several callers may get the same, and each has the part somewhere else."""
    mine = copy.copy(error)
    mine.param = mine.param or param
    return mine


def _came_late(error: MMServeError, deadline: float | None) -> bool:
    """Whether ``error`` is about time or place, and ``deadline`` has passed."""
    about_time = isinstance(error, Overloaded) or error.code == MediaTimeout.code
    return about_time and deadline is not None and time.monotonic() >= deadline


@asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """MediaTimeout when the block has not ended at ``deadline``, in seconds of ``time.monotonic``."""
    seconds = None if deadline is None else deadline - time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise MediaTimeout("it was not decoded by the deadline of the request") from None
