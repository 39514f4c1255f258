"""One frame of a camera, and what becomes of it."""

from typing import Literal, get_args

import numpy as np
from msgspec import Struct

Fate = Literal["kept", "superseded", "unchanged", "rate", "late", "too_big", "decode_error", "closed"]
Cause = Literal["first", "change", "settled", "heartbeat"]  # why a frame is kept
FATES: tuple[Fate, ...] = get_args(Fate)


class Frame(Struct, frozen=True, kw_only=True):
    """An encoded picture in ``data`` (JPEG, PNG, WebP), or uint8 RGB ``pixels`` [H, W, 3].

    ``seq`` is the sender's number, told in every acknowledgement. ``captured`` and ``received`` are seconds
    of this machine's ``time.monotonic``; a door that knows only the sender's clock converts it, and takes
    ``received`` where nothing is known. ``luma`` uint8 [h, w] spares the session a look of its own, where
    the pixels were at hand (``mmserve.preprocess.luma``). ``gated`` is the cause for which a gate where the
    frame was made has let it through; the session looks at it no more. ``order`` is the session's number.
    """

    seq: int
    data: bytes | None = None
    pixels: np.ndarray | None = None
    captured: float
    received: float
    luma: np.ndarray | None = None
    gated: Cause | None = None
    order: int = 0

    @property
    def nbytes(self) -> int:
        return (
            len(self.data) if self.data is not None else self.pixels.nbytes if self.pixels is not None else 0
        )


class Times(Struct):
    """When a frame passed each stage on its way into the context, in seconds of ``time.monotonic``; None
    until it did. ``encoded`` is None where the encoder held it before."""

    captured: float
    received: float
    gated: float | None = None
    decoded: float | None = None
    encoded: float | None = None
    prefilled: float | None = None
