"""JPEG files without what a camera wrote about the place, the time and itself; their pixels stay as they are.

The layout of a file is that of ITU-T T.81, annex B: markers (0xFF and a kind), most of them with a length of
two bytes behind. Nothing is decoded.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from mmserve.errors import MediaError

SOI, EOI, SOS = 0xD8, 0xD9, 0xDA
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # kinds of a picture's own header
JFIF, EXIF, PROFILE, ADOBE, COMMENT = 0xE0, 0xE1, 0xE2, 0xEE, 0xFE
NOTES = {*range(0xE0, 0xF0), COMMENT}
KEPT = {JFIF: b"JFIF\0", PROFILE: b"ICC_PROFILE\0", ADOBE: b"Adobe"}  # colours are wrong without
ORIENTATION = 0x0112
MOST_SIDE = 16_384
# Behind a scan's header come its bits, in which 0xFF stands before 0x00 and restarts only.
_NEXT = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")


@dataclass(frozen=True)
class Picture:
    """``data`` is the file; ``size`` is (width, height) in pixels, as it is shown."""

    data: bytes
    size: tuple[int, int]


def cleaned(data: bytes) -> Picture:
    """``data`` without notes; of those, its orientation stays. MediaError if it is no whole JPEG file."""
    parts, size, turned = [b"\xff\xd8"], None, 1
    for kind, segment in _segments(data):
        if kind in FRAMES and size is None:
            size = _size(segment)
        if kind == EXIF and segment[4:10] == b"Exif\0\0":
            turned = _orientation(segment[10:]) or turned
        if kind not in NOTES or segment[4:].startswith(KEPT.get(kind, b"\0\0\0")):
            parts.append(segment)
    if size is None:
        raise _broken("it has no picture")
    if turned != 1:
        parts.insert(1, _orienting(turned))
    return Picture(b"".join(parts), size[::-1] if turned >= 5 else size)


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every (kind, segment) behind the first marker, a scan's with its bits; nothing that follows the end."""
    if data[:2] != b"\xff\xd8":
        raise MediaError("the image is not a JPEG file", param="image")
    at = 2
    while True:
        if data[at : at + 1] != b"\xff" or at + 2 > len(data):
            raise _broken("it is damaged or cut off")
        kind = data[at + 1]
        if kind == 0xFF:  # fill
            at += 1
            continue
        if kind == EOI:
            yield kind, data[at : at + 2]
            return
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        if length < 2 or end > len(data):
            raise _broken("it is damaged or cut off")
        if kind == SOS:
            found = _NEXT.search(data, end)
            if found is None:
                raise _broken("it is cut off")
            end = found.start()
        yield kind, data[at:end]
        at = end


def _size(frame: bytes) -> tuple[int, int]:
    if len(frame) < 9:
        raise _broken("it is damaged")
    height, width = struct.unpack_from(">HH", frame, 5)
    if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE):
        raise _broken(f"its sides must be from 1 to {MOST_SIDE} pixels")
    return width, height


def _orientation(tiff: bytes) -> int | None:
    """What EXIF tells of it in the first directory; None if nothing that can be read."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for number in range(count):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * number)
            if (tag, kind) == (ORIENTATION, 3) and 1 <= value <= 8:
                return int(value)
    except struct.error:
        pass
    return None


def _orienting(turned: int) -> bytes:
    """An EXIF segment that tells the orientation and nothing else."""
    entry = struct.pack(">HHIHH", ORIENTATION, 3, 1, turned, 0)
    body = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4)
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


def _broken(why: str) -> MediaError:
    return MediaError(f"the image is no JPEG file that can be kept: {why}", param="image")
