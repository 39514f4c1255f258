"""What has the standing question answered by itself."""

import asyncio
import time
from collections.abc import Callable

from mmserve.live.events import TriggerCause
from mmserve.live.frame import Cause
from mmserve.live.policy import SessionPolicy

Fire = Callable[[TriggerCause], None]
STILL_CAUSES: tuple[Cause, ...] = ("settled", "heartbeat")  # what a gate elsewhere lets through at rest


class Triggers:
    """Calls ``fire`` as the policy says; is told of frames that are shown, and of those that are not new.

    ``still``: after a change has been shown, when no two frames in a row have differed for ``still_s``, or
    none has come.
    """

    def __init__(self, policy: SessionPolicy, fire: Fire) -> None:
        self._policy = policy
        self._fire = fire
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = False  # and not answered yet
        self._looked_at = time.monotonic()
        if policy.trigger == "every":
            self._tick()

    def shown(self, cause: Cause) -> None:
        """A frame is in the context, for ``cause``."""
        self._looked_at = time.monotonic()
        change = cause in ("first", "change")
        if self._policy.trigger == "change" and change:
            self._fire("change")
        if self._policy.trigger == "still":
            self._changed = self._changed or change
            if change:
                self._look_later()
            elif cause in STILL_CAUSES:
                self._still()

    def same(self, still_s: float) -> None:
        """A frame showed nothing new, and nothing has moved for ``still_s``."""
        self._looked_at = time.monotonic()
        if self._policy.trigger == "still" and still_s >= self._policy.still_s:
            self._still()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _still(self) -> None:
        if self._changed:
            self._changed = False
            self._fire("still")

    def _look_later(self) -> None:
        self.stop()
        self._timer = self._loop.call_later(self._policy.still_s + 0.01, self._looked)

    def _looked(self) -> None:
        """Where frames come no more, nothing moves as far as is known."""
        if time.monotonic() - self._looked_at >= self._policy.still_s:
            self._still()
        elif self._changed:
            self._look_later()

    def _tick(self) -> None:
        assert self._policy.every_s is not None
        self._timer = self._loop.call_later(self._policy.every_s, self._ticked)

    def _ticked(self) -> None:
        self._tick()
        self._fire("every")
