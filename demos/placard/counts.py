"""How much was looked at, written, saved and refused, which is all that an exhibition tells; and how fast."""

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass

from mmserve.errors import InvalidRequest

log = logging.getLogger("mmserve.placard")

HOUR_S = 3600.0
MINUTE_S = 60.0
MOST_AT_ONCE = 1000  # that a page may report


class TooMany(InvalidRequest):
    """There is room again in ``wait_s``."""

    status = 429
    code = "too_many_labels"
    wait_s = MINUTE_S


@dataclass
class Counts:
    """``looked`` are scenes that stood still, ``written`` labels, ``saved`` those that were kept, ``refused``
    what was not written or kept, since it was too much or the picture empty."""

    looked: int = 0
    written: int = 0
    saved: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._told = time.monotonic()

    def body(self) -> dict[str, int]:
        return asdict(self)

    def add(self, looked: int = 0, written: int = 0, saved: int = 0, refused: int = 0) -> None:
        self.looked += looked
        self.written += written
        self.saved += saved
        self.refused += refused
        if time.monotonic() - self._told > HOUR_S:
            self.tell()

    def tell(self) -> None:
        """Write them into the log."""
        self._told = time.monotonic()
        log.info("%s", ", ".join(f"{name} {count}" for name, count in self.body().items()))


class Pace:
    """At most ``most`` in any minute."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: deque[float] = deque(maxlen=most)

    def take(self, now: float) -> None:
        """One more; TooMany where there is no room at ``now`` (seconds of any clock)."""
        wait = self._taken[0] + MINUTE_S - now if len(self._taken) == self.most else 0.0
        if wait > 0:
            error = TooMany(f"at most {self.most} labels a minute are kept; there is room in {wait:.0f} s")
            error.wait_s = wait
            raise error
        self._taken.append(now)
