"""Early answers: what media became, by the digest of their bytes and options, lest they be decoded twice."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mmserve.core.digest import framed_digest
from mmserve.preprocess.media import MediaPart, Medium, without_pixels

Pixels = npt.NDArray[np.uint8]

T = TypeVar("T")

ENTRY_BYTES = 1024  # about what an answer takes beside its digests and times
DIGEST_BYTES = 80  # a digest of 32 bytes, as Python keeps it
TIME_BYTES = 32
ARRAY_BYTES = 128  # of an array beside its values


def part_digest(part: MediaPart) -> bytes:
    """The name of what ``part`` becomes: 32 bytes over its content and all of its options, each framed.

    Every field of the part counts but ``param``, which says where it stood, so that an option added later
    cannot be forgotten here. It reads all bytes: about a millisecond a megabyte.
    """
    fields: list[bytes | str] = [type(part).__name__]
    for name in part.__struct_fields__:
        if name != "param":
            fields += [name, _digest(getattr(part, name))]
    return framed_digest(*fields)


def _digest(value: object) -> bytes:
    if isinstance(value, bytes):
        return framed_digest("bytes", value)
    if isinstance(value, np.ndarray):
        shape = "x".join(map(str, value.shape))
        return framed_digest("array", str(value.dtype), shape, np.ascontiguousarray(value).data)
    if isinstance(value, tuple):
        return framed_digest("tuple", *map(_digest, value))
    return framed_digest("option", repr(value))


class EarlyAnswers:
    """Two bounded memories, the least recently used first to go from each. Safe from any thread.

    *Answers*: media without their pixels, by the digest of what was sent; ``capacity`` bytes of books.
    *Pixels*: those of media that the encoder does not hold yet; ``pixel_capacity`` bytes. Whoever sees that
    the encoder has an item drops the pixels of the media that show it.
    """

    def __init__(self, capacity: int, pixel_capacity: int) -> None:
        self._answers: _Bounded[Medium] = _Bounded(capacity, _bookkeeping)
        self._pixels = _Shown(pixel_capacity)
        self._lock = threading.Lock()

    def find(self, key: bytes) -> Medium | None:
        """The medium of ``key`` without its pixels."""
        with self._lock:
            return self._answers.find(key)

    def pixels(self, digests: tuple[bytes, ...]) -> tuple[Pixels | None, ...] | None:
        """The pixels of the medium with these items, or None if they are gone."""
        with self._lock:
            medium = self._pixels.find(self._pixels.key_of(digests))
        return None if medium is None else medium.pixels

    def keep(self, key: bytes, medium: Medium, *, pixels: bool) -> None:
        """Remember ``medium``, with its ``pixels`` or without."""
        with self._lock:
            self._answers.keep(key, without_pixels(medium))
            if pixels:
                self._pixels.keep(key, medium)

    def drop_pixels(self, digests: Iterable[bytes]) -> None:
        """Forget the pixels of all media that show any of ``digests``."""
        with self._lock:
            for digest in digests:
                self._pixels.drop_showing(digest)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "early_answers": len(self._answers),
                "early_answers_bytes": self._answers.nbytes,
                "early_answers_hits": self._answers.hits,
                "early_answers_misses": self._answers.misses,
                "pixel_cache_bytes": self._pixels.nbytes,
                "pixel_cache_hits": self._pixels.hits,
                "pixel_cache_misses": self._pixels.misses,
            }


class _Bounded(Generic[T]):
    """Values by digest, ``capacity`` bytes of them as ``size`` counts, least recently used first to go."""

    def __init__(self, capacity: int, size: Callable[[T], int]) -> None:
        self.capacity = capacity
        self.nbytes = self.hits = self.misses = 0
        self._size = size
        self._kept: OrderedDict[bytes, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> T | None:
        value = self._kept.get(key)
        if value is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return value

    def keep(self, key: bytes, value: T) -> None:
        """What is larger than the whole bound is not kept."""
        self.drop(key)
        if self._size(value) > self.capacity:
            return
        self._kept[key] = value
        self.nbytes += self._size(value)
        while self.nbytes > self.capacity:
            self.drop(next(iter(self._kept)))

    def drop(self, key: bytes) -> T | None:
        value = self._kept.pop(key, None)
        if value is not None:
            self.nbytes -= self._size(value)
        return value


class _Shown(_Bounded[Medium]):
    """Media with their pixels. Those of one medium are one allocation, which is free again when the last of
    its items has gone, equal ones too: so they are counted together, and go together."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, lambda medium: medium.nbytes)
        self._by_item: dict[bytes, set[bytes]] = {}  # keys of the media that show it

    def key_of(self, digests: tuple[bytes, ...]) -> bytes:
        """The key of a medium with exactly these items; of none if there is none."""
        keys = self._by_item.get(digests[0], ())
        return next((key for key in keys if self._kept[key].digests == digests), b"")

    def keep(self, key: bytes, value: Medium) -> None:
        super().keep(key, value)
        for digest in value.digests if key in self._kept else ():
            self._by_item.setdefault(digest, set()).add(key)

    def drop(self, key: bytes) -> Medium | None:
        medium = super().drop(key)
        for digest in set(medium.digests) & self._by_item.keys() if medium else ():
            self._by_item[digest].discard(key)
            if not self._by_item[digest]:
                del self._by_item[digest]
        return medium

    def drop_showing(self, digest: bytes) -> None:
        for key in tuple(self._by_item.get(digest, ())):
            self.drop(key)


def _bookkeeping(medium: Medium) -> int:
    times = len(medium.timestamps) + len(medium.seen.timestamps)
    said = sum(map(len, medium.seen.warnings))
    arrays = [array for array in (*medium.kept, medium.reference) if array is not None]
    pruned = sum(ARRAY_BYTES + array.nbytes for array in arrays)
    return ENTRY_BYTES + DIGEST_BYTES * len(medium.digests) + TIME_BYTES * times + said + pruned
