"""The queue: whose turn is it? Owners by what they were served, each one's requests by when they are due."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from mmserve.core.errors import Overloaded
from mmserve.engine.scheduler.request import Account, Request

Shelf = list[Request]  # of one priority and one owner, in the order in which they are due


class WaitingQueue:
    """Requests that wait, in the order of ``Request.rank``, which changes as owners are served.

    Fair queueing by virtual token counters (VTC, arXiv:2401.00588): an owner pays for every token that is
    computed for it, and who has paid least is next. Whoever comes back after a pause begins level with the
    least served of those who wait, so that idle time earns no credit. So nobody starves: whoever waits keeps
    his place while all others pay. Within an owner a deadline cannot starve what has none either: that is
    due ``PATIENCE_S`` after it came, and only what is due before goes ahead of it.

    ``several``: there are several owners, and each may have as many requests here as there are places left:
    one alone fills half of the queue, the next half of the rest, and there is always room for another
    (dynamic thresholds, Choudhury and Hahne 1998).
    """

    def __init__(self, places: int, several: bool = False) -> None:
        self.places = places
        self.several = several
        self._shelves: dict[int, dict[str, Shelf]] = {}  # by priority, by owner; none is empty
        self._accounts: dict[str, Account] = {}
        self._count = 0
        self._last = Account()  # whose request left last

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """The order of service, as if each request were paid for before the next is chosen."""
        for priority in sorted(self._shelves):
            yield from _in_turn(self._shelves[priority].values())

    def check_room(self, request: Request) -> None:
        """Overloaded when there is no place for a new request."""
        left, own = self.places - self._count, self._account(request).waiting
        if left <= 0:
            raise Overloaded(
                f"{self._count} requests are waiting, the most this server queues; try again later"
            )
        if self.several and own >= left:
            raise Overloaded(
                f"{own} requests of this API key are waiting, as many as there are places left for all;"
                " try again later"
            )

    def add(self, request: Request) -> None:
        account = request.account = self._account(request)
        if account.waiting == 0:
            account.served = max(account.served, self._least_served())
        account.waiting += 1
        self._count += 1
        shelves = self._shelves.setdefault(request.prepared.priority, {})
        insort(shelves.setdefault(account.owner, []), request, key=_due)

    def remove(self, request: Request) -> None:
        account, priority = request.account, request.prepared.priority
        shelves = self._shelves[priority]
        shelf = shelves[account.owner]
        del shelf[bisect_left(shelf, _due(request), key=_due)]
        if not shelf:
            del shelves[account.owner]
        if not shelves:
            del self._shelves[priority]
        account.waiting -= 1
        self._count -= 1
        self._last = account

    def check_integrity(self) -> None:
        """AssertionError unless counts and orders are as they must be."""
        shelves = [shelf for shelves in self._shelves.values() for shelf in shelves.values()]
        assert all(shelves), "an empty shelf"
        assert sum(map(len, shelves)) == self._count == sum(a.waiting for a in self._accounts.values())
        assert all(shelf == sorted(shelf, key=_due) for shelf in shelves), "a queue out of order"
        assert all(r.account is self._accounts[r.prepared.owner] for shelf in shelves for r in shelf)

    def _account(self, request: Request) -> Account:
        owner = request.prepared.owner
        if owner not in self._accounts:
            self._accounts[owner] = Account(owner)
        return self._accounts[owner]

    def _least_served(self) -> int:
        waiting = [a.served for a in self._accounts.values() if a.waiting]
        return min(waiting, default=self._last.served)


def _in_turn(shelves: Iterable[Shelf]) -> Iterator[Request]:
    """The requests of all owners of one priority."""
    heads = [(shelf[0].account.served, _due(shelf[0]), 0, shelf) for shelf in shelves]
    heapq.heapify(heads)
    while heads:
        served, _, at, shelf = heads[0]
        request = shelf[at]
        yield request
        if at + 1 < len(shelf):
            heapq.heapreplace(heads, (served + request.owed, _due(shelf[at + 1]), at + 1, shelf))
        else:
            heapq.heappop(heads)


def _due(request: Request) -> tuple[float, int]:
    return (request.due, request.arrival)
