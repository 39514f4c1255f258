"""Encoded pictures, kept by digest until the room is needed: the embedding pool of DESIGN section 4."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from mmserve.core.errors import MediaError, MMServeError


class PoolFull(MMServeError):
    """No room can be made: everything in the pool is in use. Release something and try again."""

    status = 503
    type = "server_error"
    code = "encoder_pool_full"


@dataclass(slots=True)
class _Entry:
    features: torch.Tensor
    references: int = 0


class EmbeddingPool:
    """digest -> features, sized in bytes.

    An entry is either *held* (references > 0; never evicted) or *idle* (references == 0; kept for
    the next request with the same picture, the least recently used one goes first). An entry enters
    idle, so whoever put it acquires it before the next ``put``.

        used_bytes = held_bytes + idle_bytes + reserved_bytes <= capacity_bytes

    Reserved is the room of what is being encoded: made when that begins, given back just before ``put``.

    One thread owns it; ``in`` alone may be asked from any other, whose answer is of that moment. ``noted``
    is called with each digest that comes (True) or goes (False), for whoever keeps a copy of ``digests``.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.evictions = 0
        self.noted: Callable[[bytes, bool], None] = lambda digest, came: None
        self._digests: set[bytes] = set()  # of all entries: it does not change while one is moved
        self._held: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, _Entry] = OrderedDict()
        self._held_bytes = 0
        self._idle_bytes = 0
        self.reserved_bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def digests(self) -> frozenset[bytes]:
        """Of all entries, at this moment."""
        return frozenset(self._digests)

    @property
    def used_bytes(self) -> int:
        return self._held_bytes + self._idle_bytes + self.reserved_bytes

    @property
    def available_bytes(self) -> int:
        """What new entries may take now: the free bytes and those of idle entries."""
        return self.capacity_bytes - self._held_bytes - self.reserved_bytes

    def acquire(self, digest: bytes) -> torch.Tensor | None:
        """The features of ``digest`` with one more reference, or None when they are not here."""
        entry = self._held.get(digest)
        if entry is None:
            entry = self._idle.pop(digest, None)
            if entry is None:
                return None
            self._held[digest] = entry
            self._move(entry, to_held=True)
        entry.references += 1
        return entry.features

    def release(self, digest: bytes) -> None:
        """Give back one reference; the last one leaves the entry idle. KeyError when none is held."""
        entry = self._held[digest]
        entry.references -= 1
        if entry.references == 0:
            self._idle[digest] = self._held.pop(digest)
            self._move(entry, to_held=False)

    def touch(self, digest: bytes) -> None:
        """Somebody will want ``digest``: if it is idle, it is the last to go."""
        if digest in self._idle:
            self._idle.move_to_end(digest)

    def room_for(self, spare: Iterable[bytes] = ()) -> int:
        """``available_bytes`` less the idle entries named in ``spare``, which are about to be acquired."""
        return self.available_bytes - sum(
            self._idle[digest].features.nbytes for digest in set(spare) if digest in self._idle
        )

    def put(self, digest: bytes, features: torch.Tensor) -> None:
        """Keep ``features`` (a tensor that owns its memory) as an idle entry, evicting idle ones for it.

        A digest that is already here stays as it is. MediaError when the item alone is larger than
        the pool, PoolFull when held entries leave no room.
        """
        if digest in self:
            return
        self._make_room(features.nbytes)
        self._idle[digest] = _Entry(features)
        self._idle_bytes += features.nbytes
        self._digests.add(digest)
        self.noted(digest, True)

    def reserve(self, nbytes: int) -> None:
        """Keep room for ``nbytes``, evicting idle entries for it, until ``unreserve``; errors as ``put``."""
        self._make_room(nbytes)
        self.reserved_bytes += nbytes

    def unreserve(self, nbytes: int) -> None:
        self.reserved_bytes -= nbytes

    def _make_room(self, nbytes: int) -> None:
        self.check_size(nbytes)
        if nbytes > self.available_bytes:
            used = self.capacity_bytes - self.available_bytes
            raise PoolFull(
                f"the encoder pool ({self.capacity_bytes} bytes) has {used} bytes in use and cannot take"
                f" {nbytes} more now"
            )
        while self.used_bytes + nbytes > self.capacity_bytes:
            self._evict()

    def check_size(self, nbytes: int) -> None:
        """MediaError when an item of ``nbytes`` could never be held."""
        if nbytes > self.capacity_bytes:
            raise MediaError(
                f"one picture needs {nbytes / 2**20:.1f} MiB of encoder features, the pool holds"
                f" {self.capacity_bytes / 2**20:.1f} MiB: send a smaller picture or raise encoder_cache_mib",
                code="media_too_large",
            )

    def clear(self) -> None:
        """Drop every idle entry."""
        while self._idle:
            self._evict()

    def check_integrity(self) -> None:
        """AssertionError unless the accounted bytes are the sum of the entries and references are sane."""
        held = sum(e.features.nbytes for e in self._held.values())
        idle = sum(e.features.nbytes for e in self._idle.values())
        assert self._held_bytes == held, f"held bytes: accounted {self._held_bytes}, entries {held}"
        assert self._idle_bytes == idle, f"idle bytes: accounted {self._idle_bytes}, entries {idle}"
        assert self.used_bytes <= self.capacity_bytes, (
            f"{self.used_bytes} of {self.capacity_bytes} bytes used"
        )
        assert all(e.references > 0 for e in self._held.values()), "a held entry without reference"
        assert all(e.references == 0 for e in self._idle.values()), "an idle entry with references"
        assert not self._held.keys() & self._idle.keys(), "an entry both held and idle"
        assert self._digests == self._held.keys() | self._idle.keys(), "a digest without its entry"

    def _move(self, entry: _Entry, *, to_held: bool) -> None:
        nbytes = entry.features.nbytes if to_held else -entry.features.nbytes
        self._held_bytes += nbytes
        self._idle_bytes -= nbytes

    def _evict(self) -> None:
        digest, entry = self._idle.popitem(last=False)
        self._digests.remove(digest)
        self._idle_bytes -= entry.features.nbytes
        self.evictions += 1
        self.noted(digest, False)
