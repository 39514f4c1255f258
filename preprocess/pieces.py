"""Token ids of pieces of text that were met before."""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

ENTRY_BYTES = 300  # of a key, a value and their place in the table, beside what they hold


class PieceCache:
    """Pieces of text to their token ids, at most ``capacity`` bytes; least recently used goes first.

    A conversation that goes on brings all its earlier turns again, each a piece of its own. Safe from
    many threads.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = self.hits = self.misses = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str, encode: Callable[[str], Iterable[int]]) -> Iterable[int]:
        """The ids of ``text``, by ``encode`` if they are not known."""
        with self._lock:
            found = self._ids.get(text)
            if found is not None:
                self.hits += 1
                self._ids.move_to_end(text)
                return found
            self.misses += 1
        ids = array("i", encode(text))
        with self._lock:
            self._keep(text, ids)
        return ids

    def _keep(self, text: str, ids: "array[int]") -> None:
        if text in self._ids or _nbytes(text, ids) > self.capacity:
            return
        self._ids[text] = ids
        self.nbytes += _nbytes(text, ids)
        while self.nbytes > self.capacity:
            self.nbytes -= _nbytes(*self._ids.popitem(last=False))


def _nbytes(text: str, ids: "array[int]") -> int:
    return ENTRY_BYTES + sys.getsizeof(text) + ids.itemsize * len(ids)
