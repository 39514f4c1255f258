"""Which frames show something new, told from thumbnails."""

from typing import Literal

import numpy as np
from msgspec import Struct

from mmserve.live.frame import Cause
from mmserve.live.policy import SessionPolicy

CELLS = 16  # along the longer side of the picture
LOOKS = 4.0  # looks for each frame that may be kept; between two looks frames are passed over unseen
FLASH_S = 0.35  # how long a frame that may be a flash waits for the next, which tells
FLASH_SHARE = 0.6  # of the cells that a flash brightens or darkens together

Action = Literal["keep", "drop", "hold"]


class Verdict(Struct, frozen=True, kw_only=True):
    """What to do with a frame: ``keep`` it for its ``cause``; ``drop`` it, since it shows nothing new; or
    ``hold`` it until the time ``until``, and keep it then, unless a newer frame has taken its place: it may
    be a ``flash``, which the next frame tells, or has come too soon after the last."""

    action: Action
    cause: Cause | None = None
    until: float = 0.0
    flash: bool = False


class Gate:
    """Compares each frame with the last one that was *sent* to the model, so that slow drifts add up.

    Thumbnails are averaged in cells. What all cells have in common, brightness, is taken off; a frame is new
    when two cells differ by the threshold, or one by twice that. A frame in which nearly all cells turn
    brighter or darker together waits for the next one: if that is as before, it was a flash. When motion
    comes to rest, the first still frame is sent if it differs at all. All times are in seconds, and must not
    run backwards.
    """

    def __init__(self, policy: SessionPolicy) -> None:
        self.policy = policy
        self.fps = policy.fps  # may be less, where the server is busy
        self.still_since: float | None = None  # since when two frames in a row were alike
        self._sent: np.ndarray | None = None
        self._sent_at = float("-inf")
        self._sent_in_motion = False
        self._last: np.ndarray | None = None  # as it was looked at last
        self._looked_at = float("-inf")
        self._suspect = False  # the last frame may have been a flash

    @property
    def threshold(self) -> float:
        """Grey levels of 256 by which a cell differs."""
        return 2.0 + 20.0 * (1.0 - self.policy.sensitivity)

    @property
    def interval(self) -> float:
        """Seconds between two looks that are worth while."""
        return 1.0 / (LOOKS * self.fps)

    @property
    def next_look(self) -> float:
        """When a frame is worth a look again, by the clock of the frames."""
        return self._looked_at + self.interval

    def look(self, luma: np.ndarray, at: float) -> Verdict:
        """Judge the frame that was captured ``at``, from its ``luma`` uint8 [h, w]."""
        cells = cells_of(luma)
        self._note_motion(cells, at)
        self._last, self._looked_at = cells, at
        cause = self._cause(cells, at)
        if cause is None:
            self._suspect = False
            return Verdict(action="drop")
        if cause == "change" and not self._suspect and self._may_be_flash(cells):
            self._suspect = True
            return Verdict(action="hold", cause=cause, until=at + FLASH_S, flash=True)
        due = self._sent_at + 1.0 / self.fps
        if at < due - 1e-9:
            return Verdict(action="hold", cause=cause, until=due)
        return Verdict(action="keep", cause=cause)

    def sent(self, luma: np.ndarray, at: float) -> None:
        """The frame that was captured ``at`` has gone to the model: later ones are compared with it."""
        self._sent, self._sent_at = cells_of(luma), at
        self._sent_in_motion = self.still_since is None
        self._suspect = False

    def forget(self) -> None:
        """What was sent last did not arrive: the next frame is as good as the first, but for the rate."""
        self._sent = None
        self._suspect = False

    # ------------------------------------------------------------ what is seen

    def _cause(self, cells: np.ndarray, at: float) -> Cause | None:
        if self._sent is None:
            return "first"
        differs = self._differs(cells, self._sent, self.threshold)
        if differs:
            return "change"
        if (
            self._sent_in_motion
            and self._at_rest(at)
            and self._differs(cells, self._sent, self.threshold / 2)
        ):
            return "settled"
        return "heartbeat" if at >= self._sent_at + self.policy.heartbeat_s else None

    def _at_rest(self, at: float) -> bool:
        return self.still_since is not None and at - self.still_since >= self.policy.still_s

    def _note_motion(self, cells: np.ndarray, at: float) -> None:
        if self._last is None or self._differs(cells, self._last, self.threshold):
            self.still_since = None
        elif self.still_since is None:
            self.still_since = self._looked_at

    def _differs(self, cells: np.ndarray, others: np.ndarray, threshold: float) -> bool:
        if cells.shape != others.shape:
            return True
        change = np.abs(_without_shift(cells - others))
        return bool(np.count_nonzero(change > threshold) >= 2 or change.max() > 2 * threshold)

    def _may_be_flash(self, cells: np.ndarray) -> bool:
        if self._sent is None or cells.shape != self._sent.shape:
            return False
        change = cells - self._sent
        brighter = np.count_nonzero(change > self.threshold)
        darker = np.count_nonzero(change < -self.threshold)
        return bool(max(brighter, darker) >= FLASH_SHARE * change.size)


def cells_of(luma: np.ndarray) -> np.ndarray:
    """Mean grey of each cell, float32 [h', w'], about ``CELLS`` along the longer side."""
    side = max(1, max(luma.shape) // CELLS)
    height, width = max(1, luma.shape[0] // side), max(1, luma.shape[1] // side)
    side_h, side_w = luma.shape[0] // height, luma.shape[1] // width
    cut = luma[: height * side_h, : width * side_w].astype(np.float32)
    return cut.reshape(height, side_h, width, side_w).mean(axis=(1, 3))


def _without_shift(change: np.ndarray) -> np.ndarray:
    """A change without what most cells have in common."""
    return change - np.float32(np.median(change))
