"""Pictures out of a ``multipart/x-mixed-replace`` body, as they come and wherever it is cut."""

import re
from collections.abc import Iterator

from mmserve.core.errors import InvalidRequest

MOST_BOUNDARY = 200
MOST_HEAD = 8192  # bytes of a part's headers, with the line breaks before it
KIND = "multipart/x-mixed-replace"
_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)


def boundary_of(content_type: str) -> bytes | None:
    """The boundary that a content type of this kind names; None for another kind.

    InvalidRequest if it names none that can be used.
    """
    if content_type.partition(";")[0].strip().lower() != KIND:
        return None
    found = _BOUNDARY.search(content_type)
    name = (found[1] or found[2]) if found else ""
    if not name.isascii() or not 0 < len(name) <= MOST_BOUNDARY:
        raise InvalidRequest(f"send Content-Type: {KIND};boundary=NAME", param="content-type")
    return name.encode()


class Parts:
    """Feed it the body. Each part of at most ``most_bytes`` comes out once it is whole; of a larger one
    nothing is held from then on, and None comes out.

    Cameras differ: some declare the boundary with its dashes, some end lines with a bare line feed. A part's
    own Content-Length holds where it has one; else the next boundary ends it. What is no such body is an
    error, and nothing may be fed after one.
    """

    def __init__(self, boundary: bytes, most_bytes: int) -> None:
        self._mark = b"--" + boundary.removeprefix(b"--")
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._looked = 0  # bytes of ``_held`` in which no boundary begins
        self._left: int | None = (
            None  # bytes of the part under way that were not taken, if it told its length
        )
        self._inside = False  # a part, behind its headers
        self._large = False  # it is beyond the limit
        self.ended = False  # by the closing boundary

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """The parts that are whole by the end of ``data``. InvalidRequest if it is no such body."""
        self._held += data
        while not self.ended and (self._inside or self._head()):
            count, whole = self._known()
            self._large = self._large or count > self._most_bytes
            part = self._take(count) if whole or self._large else b""
            if not whole:
                return
            self._inside = False
            if part or self._large:
                yield part or None

    def _head(self) -> bool:
        """Whether a part's headers are whole, and have been left behind."""
        del self._held[: len(self._held) - len(self._held.lstrip(b"\r\n"))]
        if self._held.startswith(self._mark + b"--"):
            self.ended = True
            return False
        match = re.search(rb"\r?\n\r?\n", self._held)
        if (match.start() if match else len(self._held)) > MOST_HEAD:
            raise InvalidRequest("the body has no headers of a part where they should stand")
        if match is None:
            return False
        first, *lines = bytes(self._held[: match.start()]).splitlines()
        if first.rstrip() != self._mark:
            raise InvalidRequest("the body has no boundary where one should stand: that of its Content-Type")
        self._left = _declared(lines)
        self._large = (self._left or 0) > self._most_bytes
        del self._held[: match.end()]
        self._inside, self._looked = True, 0
        return True

    def _known(self) -> tuple[int, bool]:
        """How many of the bytes that are held belong to the part for certain, and whether it ends there."""
        if self._left is not None:
            return min(self._left, len(self._held)), self._left <= len(self._held)
        at = self._held.find(b"\n" + self._mark, self._looked)
        if at < 0:
            self._looked = max(0, len(self._held) - len(self._mark))
            return max(0, self._looked - 1), False  # a carriage return may stand before the boundary
        return (at - 1 if at and self._held[at - 1] == 0x0D else at), True

    def _take(self, count: int) -> bytes:
        """So many bytes off what is held; none of a part beyond the limit is kept."""
        part = b"" if self._large else bytes(self._held[:count])
        del self._held[:count]
        self._looked = max(0, self._looked - count)
        if self._left is not None:
            self._left -= count
        return part


def _declared(lines: list[bytes]) -> int | None:
    """The length that a part's headers tell; None if they tell none."""
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            if not value.strip().isdigit() or len(value.strip()) > 18:
                raise InvalidRequest("a part's Content-Length is no number")
            return int(value) or None
    return None
