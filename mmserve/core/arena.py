"""Shared memory without a name, in which one process keeps the books.

The memory is an anonymous file (``memfd_create``; elsewhere a temporary file that is unlinked as soon as
it is made). It has no path, so nothing can find it but who inherits the descriptor, and nothing can be
left behind: the kernel frees it when the last process that holds it has ended, however it ended. There
is no clean-up that a kill -9 could prevent.

One process, the owner, allocates and counts references. Others map the same descriptor (``Window``) and
are told offsets; they hold no books, so their death loses nothing: the owner knows what it had granted.

    0                                                                    total
    | block A, 2 references | hole | block B, 1 | hole ..................... |

Blocks and holes cover the arena without gaps, and no two holes touch: free + used = total.
"""

import fcntl
import mmap
import os
import sys
import tempfile
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALIGNMENT = 64  # bytes, a cache line
PAGE = mmap.PAGESIZE
LARGE = 64 << 10  # blocks of this size begin on a page, and their pages go back to the kernel
# The beginning of the arena stays with it. Blocks are taken from the front, so that traffic lives there, and
# pages touched anew each time were 0.8 ms of the 5.6 ms that a worker took for a JPEG of 640x480.
WARM = 64 << 20


class ArenaFull(Exception):
    """There is no hole of the size that was asked for."""


@dataclass(frozen=True, eq=False)
class Block:
    """A range of the arena. It is known by identity, so one that was given back is never mistaken for
    another at the same place."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Arena:
    """The owner's side: allocation, references, and arrays over blocks. Safe from any thread.

    ``freed`` is called, on whatever thread, after memory has come back.
    """

    def __init__(self, nbytes: int, freed: Callable[[], None] = lambda: None) -> None:
        self.total = _rounded(nbytes, PAGE)
        self.freed = freed
        self.window = Window(_anonymous_file(self.total), self.total)
        self._holes = [Block(0, self.total)]  # by offset
        self._references: dict[Block, int] = {}
        self._used = 0
        self._lock = threading.Lock()
        self._dropped: deque[Block] = deque()  # by arrays that died; see `_sweep`

    @property
    def fd(self) -> int:
        """The descriptor, for ``pass_fds`` of a process that is to map the arena."""
        return self.window.fd

    @property
    def used(self) -> int:
        """Bytes in blocks."""
        return self._used

    @property
    def largest_hole(self) -> int:
        """The largest size that can be allocated now."""
        with self._locked():
            return max((hole.nbytes for hole in self._holes), default=0)

    # ------------------------------------------------------------ blocks

    def allocate(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``, with one reference. ArenaFull if there is no such hole.

        First fit: the lowest addresses are used again and again, so few pages are ever touched.
        """
        size = _rounded(max(nbytes, 1), PAGE if nbytes >= LARGE else ALIGNMENT)
        with self._locked():
            for i, hole in enumerate(self._holes):
                start = _rounded(hole.offset, PAGE) if size >= LARGE else hole.offset
                if start + size <= hole.end:
                    block = Block(start, size)
                    self._holes[i : i + 1] = _around(hole, block)
                    self._references[block] = 1
                    self._used += size
                    return block
        raise ArenaFull(f"{size} bytes are wanted, {self.total - self.used} of {self.total} are free")

    def retain(self, block: Block) -> None:
        """One more reference to a block that is in use."""
        with self._locked():
            self._references[block] += 1

    def release(self, block: Block) -> None:
        """One reference less; the last one frees the block. KeyError if it is not in use."""
        with self._locked():
            gone = self._release(block)
        if gone:
            self.freed()

    def trim(self, block: Block, nbytes: int) -> Block:
        """Keep only the first ``nbytes`` of a block that has one reference; the new block replaces it."""
        size = min(_rounded(max(nbytes, 1), ALIGNMENT), block.nbytes)
        kept = Block(block.offset, size)
        with self._locked():
            if self._references[block] != 1:
                raise ValueError("a block that others hold cannot be trimmed")
            del self._references[block]
            self._references[kept] = 1
            if size < block.nbytes:
                self._used -= block.nbytes - size
                self._free(Block(kept.end, block.nbytes - size))
        return kept

    def view(self, block: Block, shape: tuple[int, ...], at: int = 0) -> np.ndarray:
        """A read-only uint8 array over ``block``, ``at`` bytes from its start.

        It holds a reference of its own, as do all arrays and tensors made from it without a copy; the
        last of them to die gives the reference back.
        """
        _check_range(at, shape, block.nbytes)
        self.retain(block)
        return np.asarray(_Lease(self, block, self.window.address + block.offset + at, shape))

    def write(self, block: Block, data: bytes | memoryview | np.ndarray, at: int = 0) -> None:
        """Copy ``data`` into ``block``; the interpreter's lock is released while it is copied."""
        source = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
        _check_range(at, source.shape, block.nbytes)
        np.copyto(self.window.array(block.offset + at, source.shape), source)

    def check_integrity(self) -> None:
        """AssertionError unless blocks and holes cover the arena exactly and no two holes touch."""
        with self._locked():
            at, before = 0, None
            for part in sorted([*self._holes, *self._references], key=lambda block: block.offset):
                is_hole = part not in self._references
                assert part.offset == at, f"nothing or two things at {min(at, part.offset)}"
                assert not (is_hole and before), f"two holes touch at {at}"
                at, before = part.end, is_hole
            assert at == self.total, f"nothing at {at}"
            assert all(count > 0 for count in self._references.values())
            assert sum(block.nbytes for block in self._references) == self._used

    # ------------------------------------------------------------ the books

    def drop(self, block: Block) -> None:
        """``release`` for finalizers, which may run at any moment, also inside a method of this arena."""
        self._dropped.append(block)
        self._sweep()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            yield
        self._sweep()

    def _sweep(self) -> None:
        """Give back what finalizers dropped.

        Whoever drops a block while the lock is held leaves it to the holder, who comes by here after
        letting go; so the lock is never waited for, and no block is forgotten.
        """
        gone = False
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    gone |= self._release(self._dropped.popleft())
            finally:
                self._lock.release()
        if gone:
            self.freed()

    def _release(self, block: Block) -> bool:
        self._references[block] -= 1
        if self._references[block]:
            return False
        del self._references[block]
        self._used -= block.nbytes
        self._free(block)
        return True

    def _free(self, block: Block) -> None:
        """Turn a range into a hole, joined with its neighbours."""
        self.window.give_back(block)
        i = bisect_left(self._holes, block.offset, key=lambda hole: hole.offset)
        start, end, first, last = block.offset, block.end, i, i
        if i and self._holes[i - 1].end == start:
            start, first = self._holes[i - 1].offset, i - 1
        if i < len(self._holes) and self._holes[i].offset == end:
            end, last = self._holes[i].end, i + 1
        self._holes[first:last] = [Block(start, end - start)]


class Window:
    """The memory itself, as every process sees it: bytes by offset."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.__array_interface__["data"][0])

    def array(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """A writable uint8 array at ``offset``; it holds no reference to a block."""
        _check_range(offset, shape, len(self._bytes))
        return self._bytes[offset : offset + _size(shape)].reshape(shape)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Bytes at ``offset``, read-only."""
        return self.array(offset, (nbytes,)).data.toreadonly()

    @property
    def warm(self) -> tuple[int, int]:
        """(address, bytes) of the beginning, whose pages are never given back. What is registered with a GPU
        must lie there: a page that was given back and touched anew is another one, of which the GPU does not
        know."""
        return self.address, min(WARM, len(self._bytes))

    def give_back(self, block: Block) -> None:
        """Let the kernel have the whole pages of a large block beyond WARM; they read as zeros afterwards."""
        start, end = _rounded(max(block.offset, WARM), PAGE), block.end // PAGE * PAGE
        if block.nbytes >= LARGE and start < end and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def __del__(self) -> None:
        os.close(self.fd)


class _Lease:
    """What an array's memory belongs to: numpy keeps it alive under every view of that array."""

    def __init__(self, arena: Arena, block: Block, address: int, shape: tuple[int, ...]) -> None:
        self._arena = arena  # keeps the mapping
        self._block = block
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "data": (address, True),
        }

    def __del__(self) -> None:
        self._arena.drop(self._block)


def _anonymous_file(nbytes: int) -> int:
    """The descriptor of ``nbytes`` of zeros that take no memory until they are written."""
    if sys.platform == "linux":
        fd = os.memfd_create("mmserve-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # Nobody who maps it can cut it short, which would kill the others as they touch what is gone.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd
    shm = Path("/dev/shm")
    with tempfile.TemporaryFile(dir=shm if shm.is_dir() else None) as file:
        os.ftruncate(file.fileno(), nbytes)
        return os.dup(file.fileno())


def _around(hole: Block, block: Block) -> list[Block]:
    """What is left of ``hole`` before and behind ``block``."""
    before = Block(hole.offset, block.offset - hole.offset)
    behind = Block(block.end, hole.end - block.end)
    return [rest for rest in (before, behind) if rest.nbytes]


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


def _check_range(at: int, shape: tuple[int, ...], nbytes: int) -> None:
    if at < 0 or min(shape, default=0) < 0 or at + _size(shape) > nbytes:
        raise ValueError(f"{list(shape)} at {at} does not lie within {nbytes} bytes")
