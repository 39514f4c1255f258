"""Media that callers send once and ask about many times: by id, or by a name of their own."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from mmserve.core.digest import framed_digest
from mmserve.core.errors import PayloadTooLarge
from mmserve.preprocess.media import Kind

Content = bytes | tuple[bytes, ...]  # a file, or a clip's frames cut beforehand, a file each


@dataclass(frozen=True)
class StoredMedia:
    """What an owner has sent. ``created`` and ``expires`` are Unix seconds; each use puts ``expires`` off."""

    id: str
    owner: str
    kind: Kind
    nbytes: int
    created: float
    expires: float
    options: Mapping[str, Any] = field(repr=False)
    data: Content = field(repr=False)


class MediaLibrary:
    """Bytes of pictures and clips by owner and id, and by owner and uuid. Safe from any thread.

    Both kinds share one bound: at most ``capacity`` bytes of media, the least recently used goes first,
    and none is kept longer than ``max_age`` seconds after its last use. So the order of use is also the
    order of expiry, and whatever has expired stands at the front:

        front: used longest ago, expires first ........ back: used last
    """

    def __init__(self, capacity: int, max_age: float, *, clock: Callable[[], float] = time.time) -> None:
        self.capacity = capacity
        self.max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, str], StoredMedia] = OrderedDict()  # (shelf, owner, name)
        self._nbytes = self._hits = self._misses = self._evicted = self._expired = 0

    # ------------------------------------------------------------ media with an id

    def put(
        self, owner: str, data: Content, options: Mapping[str, Any] | None = None, *, kind: Kind
    ) -> StoredMedia:
        """Keep ``data`` with its ``options`` (JSON values); the same ones get the same id again.

        It reads all of ``data``, which takes a millisecond a megabyte. PayloadTooLarge if it can never fit.
        """
        name = media_id(owner, kind, data, options or {})
        media = self._made(name, owner, kind, data, options or {})
        if media.nbytes > self.capacity:
            raise PayloadTooLarge(
                f"the {kind} has {media.nbytes} bytes; this server stores at most {self.capacity}"
                " (media_store_mib)"
            )
        with self._lock:
            before = self._kept.get(("id", owner, name))
            return self._keep("id", replace(media, created=before.created) if before else media)

    def get(self, owner: str, name: str) -> StoredMedia | None:
        """The media that ``owner`` stored under the id ``name``; None if it never was or is gone."""
        return self._used("id", owner, name)

    def delete(self, owner: str, name: str) -> bool:
        """Forget it now; whether it was there."""
        with self._lock:
            self._expire()
            return self._drop(("id", owner, name)) is not None

    def list(self, owner: str) -> tuple[StoredMedia, ...]:
        """What ``owner`` has stored, the least recently used first. Nothing is touched by it."""
        with self._lock:
            self._expire()
            return tuple(m for (shelf, o, _), m in self._kept.items() if (shelf, o) == ("id", owner))

    # ------------------------------------------------------------ media under the caller's own name

    def bind(self, owner: str, uuid: str, kind: Kind, data: Content) -> None:
        """From now on ``uuid`` means ``data`` to ``owner``, whatever it meant before.

        Data that can never fit is not kept, and ``uuid`` then means nothing rather than something old.
        """
        media = self._made(uuid, owner, kind, data, {})
        with self._lock:
            self._drop(("uuid", owner, uuid))
            if media.nbytes <= self.capacity:
                self._keep("uuid", media)

    def bound(self, owner: str, uuid: str) -> StoredMedia | None:
        """What ``uuid`` means to ``owner``; None if it never meant anything or is gone."""
        return self._used("uuid", owner, uuid)

    # ------------------------------------------------------------ what others may know

    def stats(self) -> dict[str, int]:
        with self._lock:
            self._expire()
            return {
                "media_store_items": len(self._kept),
                "media_store_bytes": self._nbytes,
                "media_store_hits": self._hits,
                "media_store_misses": self._misses,
                "media_store_evicted": self._evicted,
                "media_store_expired": self._expired,
            }

    def check_integrity(self) -> None:
        """AssertionError unless the bytes are those of the media, within the bound."""
        with self._lock:
            held = sum(m.nbytes for m in self._kept.values())
            assert self._nbytes == held <= self.capacity, f"{self._nbytes} accounted, {held} kept"
            for (_, owner, name), media in self._kept.items():
                assert (owner, name) == (media.owner, media.id), "media on another's shelf"

    # ------------------------------------------------------------ under the lock

    def _made(
        self, name: str, owner: str, kind: Kind, data: Content, options: Mapping[str, Any]
    ) -> StoredMedia:
        now = self._clock()
        return StoredMedia(name, owner, kind, _nbytes(data), now, now + self.max_age, dict(options), data)

    def _keep(self, shelf: str, media: StoredMedia) -> StoredMedia:
        self._expire()
        key = (shelf, media.owner, media.id)
        self._drop(key)
        self._kept[key] = media
        self._nbytes += media.nbytes
        while self._nbytes > self.capacity:
            self._drop(next(iter(self._kept)))
            self._evicted += 1
        return media

    def _used(self, shelf: str, owner: str, name: str) -> StoredMedia | None:
        key = (shelf, owner, name)
        with self._lock:
            self._expire()
            media = self._kept.pop(key, None)
            if media is None:
                self._misses += 1
                return None
            self._hits += 1
            media = self._kept[key] = replace(media, expires=self._clock() + self.max_age)
            return media

    def _drop(self, key: tuple[str, str, str]) -> StoredMedia | None:
        media = self._kept.pop(key, None)
        if media is not None:
            self._nbytes -= media.nbytes
        return media

    def _expire(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).expires <= now:
            self._drop(next(iter(self._kept)))
            self._expired += 1


def media_id(owner: str, kind: Kind, data: Content, options: Mapping[str, Any]) -> str:
    """The name of ``data`` with ``options`` among what ``owner`` stores: all 32 bytes of their digest."""
    files = (data,) if isinstance(data, bytes) else data
    said = msgspec.json.encode(options, order="deterministic")
    return "media-" + framed_digest("stored", owner, kind, said, isinstance(data, bytes), *files).hex()


def _nbytes(data: Content) -> int:
    return len(data) if isinstance(data, bytes) else sum(map(len, data))
