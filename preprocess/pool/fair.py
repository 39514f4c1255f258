"""A queue in which requests take turns."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items wait behind those of their own request only: requests are served in rotation.

        front: next to be served                 back: served last
        request A [a3, a4, a5]   request B [b1]  request C [c2, c3]

    So a request with one picture waits for at most one item of every other, however many those have.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        for items in self._waiting.values():
            yield from items

    def put(self, request: object, item: T) -> None:
        self._waiting.setdefault(request, deque()).append(item)

    def put_back(self, request: object, item: T) -> None:
        """An item that was taken and could not be served yet: the first of its request again."""
        self._waiting.setdefault(request, deque()).appendleft(item)

    def take(self, may_begin: Callable[[T], bool] = lambda item: True) -> T | None:
        """The first item of the first request whose first item may begin; that request goes to the back."""
        for request, items in self._waiting.items():
            if may_begin(items[0]):
                item = items.popleft()
                self._waiting.move_to_end(request)
                if not items:
                    del self._waiting[request]
                return item
        return None

    def drop(self, request: object, item: T) -> bool:
        """Take ``item`` out of the queue; False if it does not wait."""
        items = self._waiting.get(request, deque())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[request]
        return True
