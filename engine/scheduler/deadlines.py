"""Who is too late? Asked at every step, so it costs nothing while nobody is."""

import heapq

from mmserve.engine.scheduler.request import Request


class Deadlines:
    """Requests that have one, until they end. The heap outlives them in numbers only, and not for long."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by arrival
        self._order: list[tuple[float, int]] = []  # heap of (deadline, arrival)

    def add(self, request: Request) -> None:
        if request.prepared.deadline is not None:
            self._requests[request.arrival] = request
            heapq.heappush(self._order, (request.prepared.deadline, request.arrival))

    def remove(self, request: Request) -> None:
        self._requests.pop(request.arrival, None)
        if len(self._order) > 4 * len(self._requests) + 64:
            self._order = [entry for entry in self._order if entry[1] in self._requests]
            heapq.heapify(self._order)

    def passed(self, now: float) -> list[Request]:
        """Take out those whose deadline is over: the ones among them that have no token yet."""
        late = []
        while self._order and self._order[0][0] <= now:
            request = self._requests.pop(heapq.heappop(self._order)[1], None)
            if request is not None and not request.num_generated:
                late.append(request)
        return late
