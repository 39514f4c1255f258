"""Pixels lent to the engine process: what is lent, and when it is read no more."""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from mmserve.core.arena import Arena, Window
from mmserve.processes.messages import Slot


class Loans:
    """The api's side. An array that is lent is kept alive, and with it its block of the arena, until the
    engine has given it back or is no more; nobody else can then be given that memory.

    One thread's.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lent: dict[int, np.ndarray] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, pixels: np.ndarray) -> Slot:
        """Where the engine finds ``pixels``, uint8: as they lie, or copied into the arena if they do not lie
        in it. ArenaFull if there is no room for that."""
        at = self._place(pixels)
        if at is None:
            pixels = self._copied(pixels)
            at = self._place(pixels)
            assert at is not None
        self._number += 1
        self._lent[self._number] = pixels
        return Slot(self._number, at, pixels.shape)

    def give_back(self, loans: Iterable[int]) -> None:
        for loan in loans:
            self._lent.pop(loan, None)

    def keep_only(self, loans: Iterable[int]) -> None:
        """These are all that the engine holds."""
        self.give_back(self._lent.keys() - set(loans))

    def _place(self, pixels: np.ndarray) -> int | None:
        at = int(pixels.__array_interface__["data"][0]) - self._arena.window.address
        inside = 0 <= at <= self._arena.total - pixels.nbytes
        return at if inside and pixels.flags.c_contiguous else None

    def _copied(self, pixels: np.ndarray) -> np.ndarray:
        block = self._arena.allocate(pixels.nbytes)
        try:
            self._arena.write(block, np.ascontiguousarray(pixels).reshape(-1))
            return self._arena.view(block, pixels.shape)
        finally:
            self._arena.release(block)  # the view has a reference of its own


class Borrowed:
    """The engine's side: arrays over the arena that tell when the last view of them has died.

    ``returned`` is called, on whatever thread, after that.
    """

    def __init__(self, window: Window, returned: Callable[[], None]) -> None:
        self.returned = returned
        self._window = window
        self._out: dict[int, None] = {}
        self._dead: deque[int] = deque()

    def array(self, slot: Slot) -> np.ndarray:
        """The pixels of ``slot``, read-only."""
        self._out[slot.loan] = None
        return np.asarray(_Borrowing(self, slot, self._window))

    @property
    def outstanding(self) -> frozenset[int]:
        return frozenset(list(self._out))

    def take_returned(self) -> tuple[int, ...]:
        """The loans that have ended since this was last asked."""
        returned = []
        while self._dead:
            returned.append(self._dead.popleft())
        return tuple(returned)

    def _end(self, loan: int) -> None:
        self._out.pop(loan, None)
        self._dead.append(loan)
        self.returned()


class _Borrowing:
    """What an array's memory belongs to: numpy keeps it alive under every view of that array, and torch
    under every tensor made from one without a copy."""

    def __init__(self, owner: Borrowed, slot: Slot, window: Window) -> None:
        self._owner = owner
        self._loan = slot.loan
        array = window.array(slot.offset, slot.shape)  # checks the range
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": slot.shape,
            "data": (int(array.__array_interface__["data"][0]), True),
        }

    def __del__(self) -> None:
        self._owner._end(self._loan)
