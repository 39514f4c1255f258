"""What the api and the process of one camera say to each other: msgpack over a socket of its own.

    api                                        process of a camera
      Offer ───────────────────────────▶         (WebRTC)
      ◀──────────────── Answered
      ◀──────────────── Live, Away, Tally, Opened, Heard
      ◀──────────────── Picture, then its pixels
      Watch, Say, Trickle ─────────────▶
      ◀──────────────── Ended                    (its last word)

How a process is started, greeted with a hello, told dead from alive and ended is the matter of
``mmserve.processes``; this socket is beside that one. A camera's process decodes what strangers send, so what
it says is held to these types and to limits, and never executed. All times are of the machine's one
monotonic clock, which every process on it shares.
"""

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from mmserve.core.config import CameraOptions, MediaOptions
from mmserve.core.wire import Fault, decoded, encoded, prefixed
from mmserve.live.frame import Fate
from mmserve.live.policy import SessionPolicy

MOST_BYTES = 1 << 20  # of one message, the pixels that follow not counted

# ---------------------------------------------------------------- hellos


class PullHello(Struct, tag=True, frozen=True):
    """Pull the camera at ``url`` (see ``CameraUrl``). With ``loop`` a file begins anew at its end."""

    url: str
    loop: bool
    policy: SessionPolicy
    cameras: CameraOptions
    media: MediaOptions


class WhipHello(Struct, tag=True, frozen=True):
    """Get ready for an ``Offer``, which comes over the other socket when there is one."""

    cameras: CameraOptions
    media: MediaOptions


CameraHello = PullHello | WhipHello

# ---------------------------------------------------------------- to a camera


class Offer(Struct, tag=True, frozen=True):
    """Answer this offer. ``reached`` is the address of this machine that the client has reached."""

    sdp: str
    reached: str | None
    policy: SessionPolicy


class Watch(Struct, tag=True, frozen=True):
    """Watch by another policy from now on."""

    policy: SessionPolicy


class Say(Struct, tag=True, frozen=True):
    """Send this text over the data channel, if there is one."""

    text: str


class Trickle(Struct, tag=True, frozen=True):
    """Candidates of the client's that came after its offer, each as the value of an ``a=candidate`` line."""

    candidates: tuple[str, ...]


ToCamera = Offer | Watch | Say | Trickle

# ---------------------------------------------------------------- from a camera


class Answered(Struct, tag=True, frozen=True):
    sdp: str


class Live(Struct, tag=True, frozen=True):
    """It is connected; ``what`` says what comes, in words for people."""

    what: str


class Away(Struct, tag=True, frozen=True):
    """It cannot be had at the moment and is tried again."""

    why: str


class Drop(Struct, frozen=True):
    """So many frames dropped for one reason; ``seq`` and ``captured`` are of the newest."""

    count: int
    seq: int
    captured: float


class Tally(Struct, tag=True, frozen=True):
    """Frames since the last tally: all that came, and those dropped here."""

    received: int
    dropped: dict[Fate, Drop]


class Opened(Struct, tag=True, frozen=True):
    """The client has opened its data channel."""


class Heard(Struct, tag=True, frozen=True):
    """The client has sent this text over its data channel."""

    text: str


class Picture(Struct, tag=True, frozen=True):
    """A frame that may show something new; ``height * width * 3`` bytes follow, RGB and upright.

    ``luma`` uint8 [h, w] is its thumbnail, of the stored frame.
    """

    seq: int
    captured: float
    received: float
    luma: np.ndarray
    height: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.height * self.width * 3


class Ended(Struct, tag=True, frozen=True):
    """Nothing more comes. ``fault`` is why, if it is one; ``why`` says it in any case."""

    why: str
    fault: Fault | None = None


FromCamera = Answered | Live | Away | Tally | Opened | Heard | Picture | Ended

# ---------------------------------------------------------------- bytes


def to_bytes(message: Any) -> bytes:
    """A message with its length in front."""
    return prefixed(_encoder.encode(message))


_encoder = msgspec.msgpack.Encoder(enc_hook=encoded)
to_hello = msgspec.msgpack.Decoder(CameraHello, dec_hook=decoded).decode
to_camera = msgspec.msgpack.Decoder(ToCamera, dec_hook=decoded).decode
from_camera = msgspec.msgpack.Decoder(FromCamera, dec_hook=decoded).decode
