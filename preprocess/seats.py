"""How many requests may be under preparation at once."""

from collections import Counter

from mmserve.core.errors import Overloaded


class Seats:
    """How many requests are being prepared: at most ``limit``, each with any number of parts."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parts: Counter[object] = Counter()

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, request: object) -> bool:
        return request in self._parts

    def take(self, request: object) -> None:
        """One more part of ``request``; Overloaded if it is a new one and every seat is taken."""
        if request not in self._parts and len(self._parts) >= self.limit:
            raise Overloaded(
                f"{len(self._parts)} requests are being prepared, the most that is allowed; try later"
            )
        self._parts[request] += 1

    def leave(self, request: object) -> None:
        self._parts[request] -= 1
        if not self._parts[request]:
            del self._parts[request]
