"""A decoded frame to an upright RGB picture."""

import struct
from typing import Any

from PIL import Image

from mmserve.core.errors import MediaError
from mmserve.preprocess.container import FAULTS, reason
from mmserve.preprocess.pixels import Colour, on_background

MOST_STRETCH = 4  # a pixel's width over its height, or the reverse; beyond it the file is not believed


def upright(frame: Any, background: Colour) -> Image.Image:
    """RGB as shown: turned and mirrored by the display matrix, transparency on ``background``.

    The stream's own colour matrix and range decide about the colours; both fields of an interlaced frame
    stay woven. MediaError where the pixel format has no RGB form.
    """
    picture = _rgb(frame, background)
    turn = turn_of(frame)
    return picture if turn is None else picture.transpose(turn)


def turn_of(frame: Any) -> Image.Transpose | None:
    """What turns the stored frame upright, from the nearest of the eight that its display matrix can be.

    The matrix maps (x, y) to (ax + cy, bx + dy), in 16.16 fixed point.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return None
    a, b, _, c, d = struct.unpack_from("<5i", bytes(matrix))
    if max(abs(a), abs(d)) >= max(abs(b), abs(c)):
        return {
            (True, False): Image.Transpose.FLIP_LEFT_RIGHT,
            (False, True): Image.Transpose.FLIP_TOP_BOTTOM,
            (True, True): Image.Transpose.ROTATE_180,
        }.get((a < 0, d < 0))
    return {
        (False, False): Image.Transpose.TRANSPOSE,
        (False, True): Image.Transpose.ROTATE_270,
        (True, False): Image.Transpose.ROTATE_90,
        (True, True): Image.Transpose.TRANSVERSE,
    }[b < 0, c < 0]


def stretch_of(stream: Any, frame: Any) -> float:
    """Width of a pixel over its height, after the frame was turned upright."""
    ratio = float(stream.sample_aspect_ratio or 1)
    if not 1 / MOST_STRETCH <= ratio <= MOST_STRETCH:
        return 1.0
    turn = turn_of(frame)
    return 1 / ratio if turn is not None and turn in SIDEWAYS else ratio


SIDEWAYS = (
    Image.Transpose.ROTATE_90,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.TRANSVERSE,
)


def _rgb(frame: Any, background: Colour) -> Image.Image:
    seen_through = any(c.is_alpha for c in frame.format.components)
    try:
        pixels = frame.to_ndarray(format="rgba" if seen_through else "rgb24", threads=1)
    except MemoryError:
        raise
    except FAULTS as error:
        raise MediaError(
            f"frames of pixel format {frame.format.name} cannot be shown: {reason(error)}"
        ) from None
    picture = Image.fromarray(pixels)
    return on_background(picture, background) if seen_through else picture
