"""A bounded memory of what was computed."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from mmserve.core.errors import MMServeError
from mmserve.preprocess.media import Medium


class MediumCache:
    """Resized media by the digest of their bytes and options; least recently used goes first.

    ``capacity`` bounds the pixels kept, in bytes. Who asks for a key that another thread is computing
    waits for it, so the same new picture is decoded once. Failures are not kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = self.hits = self.misses = 0
        self._kept: OrderedDict[bytes, Medium] = OrderedDict()
        self._pending: dict[bytes, Future[Medium]] = {}
        self._lock = threading.Lock()

    def get(self, key: bytes, make: Callable[[], Medium]) -> tuple[Medium, bool]:
        """The medium of ``key``, made if it is not there, and whether it was found."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self.hits += 1
                return found, True
            pending = self._pending.get(key)
            if pending is None:
                mine = self._pending[key] = Future()
                self.misses += 1
        if pending is not None:
            return _awaited(pending), True
        return self._make(key, make, mine), False

    def _make(self, key: bytes, make: Callable[[], Medium], future: Future[Medium]) -> Medium:
        try:
            medium = make()
        except BaseException as error:
            with self._lock:
                del self._pending[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._pending[key]
            self._keep(key, medium)
        future.set_result(medium)
        return medium

    def _keep(self, key: bytes, medium: Medium) -> None:
        if medium.nbytes > self.capacity:
            return
        self._kept[key] = medium
        self.nbytes += medium.nbytes
        while self.nbytes > self.capacity:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes


def _awaited(pending: Future[Medium]) -> Medium:
    """Another caller's result; its error is copied, since an error names its own caller's field."""
    try:
        return pending.result()
    except MMServeError as error:
        mine = copy.copy(error)
        mine.param = None
        raise mine from None
