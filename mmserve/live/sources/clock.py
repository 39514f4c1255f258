"""When frames were captured, from the timestamps that a source gives them."""

JUMP_S = 10.0  # further off than this, and the source has begun to count anew
DRIFT = 5e-4  # seconds a second by which a source's clock may run slow and still be followed


class SourceClock:
    """Maps a source's own seconds to this machine's monotonic ones.

    Of all frames so far the one with the least delay is taken to have come without any, so a frame that was
    held up on its way (in the network, or in a queue before us) is known to be older than its arrival.
    """

    def __init__(self) -> None:
        self._offset: float | None = None
        self._last = 0.0

    def captured(self, seconds: float | None, received: float) -> float:
        """Never later than ``received``; that itself for a source that tells no time."""
        if seconds is None:
            return received
        offset = received - seconds
        if self._offset is None or abs(offset - self._offset) > JUMP_S:
            self._offset = offset
        else:
            self._offset = min(offset, self._offset + DRIFT * (received - self._last))
        self._last = received
        return seconds + self._offset
