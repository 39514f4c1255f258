"""Binary messages of a realtime client: frames of a camera, with a header or without.

Without one a message is a whole picture file (JPEG, PNG or WebP, told by its content); frames are numbered
from 1 as they come and count as captured when they arrive. Under the subprotocol ``mmserve.frames.v1`` a
picture may stand behind a header of 16 bytes, in network order::

    0  2  magic "MF"
    2  1  version, 1
    3  1  flags: 1 = the capture time is given, 2 = it is Unix time of a clock that is set right
    4  4  sequence number, unsigned
    8  8  capture time in microseconds, unsigned

Without flag 2 the clock may begin anywhere (``performance.now()``): the frame that took least to arrive, in
the last half minute or so, counts as having taken no time, and the others by how much longer they took.
"""

import struct
import time
from collections.abc import Callable

from mmserve.core.errors import InvalidRequest
from mmserve.live.frame import Frame

HEADER = struct.Struct("!2sBBIQ")
MAGIC, VERSION = b"MF", 1
HAS_TIME, UNIX_TIME = 1, 2
SPAN_S = 15.0  # of each of the two spans in which the fastest frame is remembered


class FrameReader:
    """Makes frames of messages; ``headers`` is whether they may have one."""

    def __init__(self, headers: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._headers = headers
        self._clock = clock
        self._count = 0
        self._senders = SenderClock()

    def read(self, message: bytes) -> Frame:
        """The frame; InvalidRequest for a header that is none of this version."""
        received = self._clock()
        self._count += 1
        if not self._headers or message[:2] != MAGIC:
            return Frame(seq=self._count, data=message, captured=received, received=received)
        if len(message) < HEADER.size or message[2] != VERSION:
            raise InvalidRequest(
                f"a frame's header must have {HEADER.size} bytes and version {VERSION}", param="frame"
            )
        _, _, flags, seq, micros = HEADER.unpack_from(message)
        captured = self._captured(flags, micros / 1e6, received)
        return Frame(seq=seq, data=message[HEADER.size :], captured=captured, received=received)

    def _captured(self, flags: int, told: float, received: float) -> float:
        if not flags & HAS_TIME:
            return received
        if flags & UNIX_TIME:
            return min(received, received - (time.time() - told))
        return self._senders.here(told, received)


class SenderClock:
    """A clock that began anywhere, in seconds, converted to ours. It may drift, or begin anew."""

    def __init__(self) -> None:
        self._since = self._latest = float("-inf")
        self._least = self._least_before = float("inf")  # received - told, in this span and in the one before

    def here(self, told: float, received: float) -> float:
        """The moment ``told`` by the sender on our clock, for what was received at ``received``."""
        distance = received - told
        if received - self._since > 2 * SPAN_S or told < self._latest - 1:
            self._since, self._least, self._least_before = received, distance, distance
        elif received - self._since > SPAN_S:
            self._since, self._least, self._least_before = received, distance, self._least
        self._latest = told
        self._least = min(self._least, distance)
        return min(received, told + min(self._least, self._least_before))


def looks_like_picture(data: bytes) -> bool:
    """Whether it begins as a JPEG, PNG or WebP file does."""
    return (
        data[:3] == b"\xff\xd8\xff"
        or data[:8] == b"\x89PNG\r\n\x1a\n"
        or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")
    )
