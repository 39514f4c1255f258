"""How many cameras the engine can watch: what frames and answers cost, and who must slow down."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from mmserve.core.errors import Overloaded
from mmserve.live.policy import SessionPolicy

Kind = Literal["frame", "answer"]

MOST_SLOWED = 4.0  # times that the rate of frames goes down before their pixels do
MOST_SHRUNK = 4.0  # times that their pixels go down before cameras are refused
MEMORY_S = 15.0  # of rates
WEIGHT = 0.1  # of a new measurement of cost
MEASURED = 5  # costs before they are believed


class Meter:
    """Time of the engine, shared out among those who use it at once (processor sharing): while n of them do,
    each is charged an n-th. So a cost does not depend on how busy the engine was."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._users = 0
        self._charged = 0.0
        self._since = clock()

    @contextmanager
    def using(self) -> Iterator[Callable[[], float]]:
        """Around one use; what is yielded tells its cost so far, in seconds."""
        self._advance(+1)
        begun = self._charged

        def cost() -> float:
            self._advance(0)
            return self._charged - begun

        try:
            yield cost
        finally:
            self._advance(-1)

    def _advance(self, change: int) -> None:
        now = self._clock()
        if self._users:
            self._charged += (now - self._since) / self._users
        self._since = now
        self._users += change


class Rate:
    """Amounts a second, over the last ``MEMORY_S`` or so; ``start`` is what is believed at first."""

    def __init__(self, clock: Callable[[], float], start: float = 0.0) -> None:
        self._clock = clock
        self._rate = start
        self._at = clock()

    def add(self, amount: float = 1.0) -> None:
        self._rate = self.now + amount / MEMORY_S
        self._at = self._clock()

    @property
    def now(self) -> float:
        return self._rate * math.exp((self._at - self._clock()) / MEMORY_S)


class Seat:
    """One session's place. ``fps`` and ``max_pixels`` are its policy's, less where the server is busy."""

    def __init__(self, capacity: "Capacity", policy: SessionPolicy, activity: float) -> None:
        self.policy = policy
        self._capacity = capacity
        self._kept = Rate(capacity.clock, activity)

    @property
    def activity(self) -> float:
        """Which part of the frames that it may send it does send."""
        return min(1.0, self._kept.now)

    @property
    def demand(self) -> float:
        """Frames a second that it would send if nothing slowed it down."""
        return self.policy.fps * self.activity

    @property
    def slowed(self) -> float:
        """By how much its frames are fewer at this moment, from 1 to ``MOST_SLOWED``."""
        return min(max(1.0, self._capacity.slowed / self.policy.weight), MOST_SLOWED)

    @property
    def fps(self) -> float:
        return self.policy.fps / self.slowed

    @property
    def max_pixels(self) -> int:
        return max(1024, int(self.policy.max_pixels / self._capacity.shrunk))

    def kept(self) -> None:
        """A frame has been sent to the model."""
        self._kept.add(1.0 / self.fps)

    @contextmanager
    def work(self, kind: Kind) -> Iterator[None]:
        """Around what the engine does for it, whose cost counts; that of a frame only if it ends well."""
        with self._capacity.meter.using() as cost:
            well = False
            try:
                yield
                well = True
            finally:
                if well or kind == "answer":
                    self._capacity.note(kind, cost())

    def leave(self) -> None:
        """The session has ended. Twice is once."""
        self._capacity.leave(self)


class Capacity:
    """Shared by the sessions of one service.

    load = sum over cameras (frames a second × cost of a frame) + answers, in seconds of the engine a second.
    Where it passes ``limit``, all cameras send fewer frames, down to a quarter, those of less weight more so;
    then frames have fewer pixels, down to a quarter; a new camera for which that is not enough is refused.
    """

    def __init__(
        self, limit: float = 0.9, most: int = 256, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.most = most
        self.clock = clock
        self.meter = Meter(clock)
        self.seats: set[Seat] = set()
        self.refused = 0
        self.frame_cost = 0.0  # seconds of the engine, at full pixels
        self._measured = 0
        self._answers = Rate(clock)

    def admit(self, policy: SessionPolicy) -> Seat:
        """A place for a session; Overloaded, with the reason, if there is none."""
        if len(self.seats) >= self.most:
            self._refuse(f"{self.most} live sessions are open, the most that is allowed; try later")
        activities = [seat.activity for seat in self.seats]
        seat = Seat(self, policy, max(0.05, sum(activities) / len(activities)) if activities else 1.0)
        load = self.load + seat.demand * self.frame_cost
        if load > self.limit * MOST_SLOWED * MOST_SHRUNK:
            self._refuse(
                f"the {len(self.seats)} cameras here and this one would take {load:.1f} times what the engine"
                f" can do (a frame takes {self.frame_cost * 1000:.0f} ms), even with fewer frames and pixels"
                " too much; try later, or with a lower fps"
            )
        self.seats.add(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        self.seats.discard(seat)

    def note(self, kind: Kind, cost: float) -> None:
        """A frame or an answer has cost so many seconds of the engine."""
        if kind == "answer":
            self._answers.add(cost)
            return
        full = cost * self.shrunk
        self._measured += 1
        weight = max(WEIGHT, 1.0 / self._measured)
        self.frame_cost += weight * (full - self.frame_cost)

    @property
    def load(self) -> float:
        """What everybody would take at full rate and pixels, in seconds of the engine a second."""
        if self._measured < MEASURED:
            return 0.0
        return sum(seat.demand for seat in self.seats) * self.frame_cost + self._answers.now

    @property
    def slowed(self) -> float:
        """How many times fewer frames are sent."""
        return min(max(1.0, self.load / self.limit), MOST_SLOWED)

    @property
    def shrunk(self) -> float:
        """How many times fewer pixels a frame has."""
        return min(max(1.0, self.load / self.limit / MOST_SLOWED), MOST_SHRUNK)

    def stats(self) -> dict[str, Any]:
        return {
            "live_sessions": len(self.seats),
            "live_refused": self.refused,
            "live_load": self.load,
            "live_slowed": self.slowed,
            "live_shrunk": self.shrunk,
            "live_frame_cost_seconds": self.frame_cost,
        }

    def _refuse(self, why: str) -> None:
        self.refused += 1
        raise Overloaded(why)
