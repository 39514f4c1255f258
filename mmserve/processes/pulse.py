"""Signs of life: what a child tells of itself twice a second, and what its parent makes of it.

    child: a thread beside its loop ── Alive ──▶ parent: Vitals, looked at four times a second

A clock goes on while the machine sleeps, or while the thread that looks at it is held up, and neither says
anything of a child. So no time is taken between two looks that lie far apart: both sides look often, and
count of a pause between two of their own looks no more than twice what was meant (``Watch``).
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from mmserve.processes.messages import Alive

PULSE_S = 0.5  # between two signs of life
LOOK_S = 0.25  # between two looks of the parent's
UNREADY_PART = 1 / 3  # of ``hang_s`` in silence, and a child is not relied on any more


class Patience(NamedTuple):
    """Seconds that a child may be silent, and that one step of its loop may take."""

    hang_s: float
    step_s: float


class Watch:
    """Counts seconds since ``restart`` for somebody who looks about every ``every_s``. All times are seconds
    of one monotonic clock."""

    def __init__(self, every_s: float, now: float) -> None:
        self.seconds = 0.0
        self._most = 2 * every_s
        self._looked = now

    def look(self, now: float) -> float:
        self.seconds += min(now - self._looked, self._most)
        self._looked = now
        return self.seconds

    def restart(self, now: float) -> None:
        self.seconds, self._looked = 0.0, now


class Pulse:
    """The child's side: a thread that says every ``PULSE_S`` for how long the process has been at one step.

    ``busy_since`` tells when the present step began, by ``time.monotonic``; None between two.
    """

    def __init__(self, say: Callable[[Alive], None], busy_since: Callable[[], float | None]) -> None:
        self._say = say
        self._busy_since = busy_since
        self._since: float | None = None
        self._watch = Watch(PULSE_S, time.monotonic())

    def start(self) -> None:
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def sign(self, now: float) -> Alive:
        since = self._busy_since()
        if since is None or since != self._since:
            self._since = since
            self._watch.restart(now)
        return Alive(self._watch.look(now))

    def _beat(self) -> None:
        with suppress(OSError):  # the parent has ended, and with it this process
            while True:
                self._say(self.sign(time.monotonic()))
                time.sleep(PULSE_S)


class Vitals:
    """The parent's side: how a child is, by what was heard of it. ``look`` is called every ``LOOK_S``."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._silence = Watch(LOOK_S, now)
        self._busy_s = 0.0

    def hear(self, alive: Alive, now: float) -> None:
        self._silence.restart(now)
        self._busy_s = alive.busy_s

    def look(self, now: float) -> str | None:
        """Why the child is to be killed, if it is."""
        hang_s, step_s = self._patience
        if self._silence.look(now) > hang_s:
            return f"it gave no sign of life for {hang_s:g} s"
        if self._busy_s > step_s:
            return f"a step of it took longer than {step_s:g} s"
        return None

    @property
    def trouble(self) -> str | None:
        """Why the child is not relied on at this moment, as of the last look; None if it is."""
        hang_s, silent_s = self._patience.hang_s, self._silence.seconds
        if silent_s <= hang_s * UNREADY_PART:
            return None
        return f"has given no sign of life for {silent_s:.0f} s; after {hang_s:g} s it is started again"
