"""Pictures out of a ``multipart/x-mixed-replace`` body, as they come and wherever it is cut."""

import re
from collections.abc import Iterator

from mmserve.core.errors import InvalidRequest, PayloadTooLarge

MOST_BOUNDARY = 200
MOST_HEAD = 8192  # bytes of a part's headers, with the line breaks before it
KIND = "multipart/x-mixed-replace"
_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)


class PartTooLarge(PayloadTooLarge):
    """A part is larger than a frame may be."""


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
    """Feed it the body. Each part of at most ``most_bytes`` comes out once it is whole.

    Cameras differ: some declare the boundary with its dashes, some end lines with a bare line feed. A part's
    own Content-Length holds where it has one; else the next boundary ends it. What is no such body, or
    larger, is an error, and nothing may be fed after one.
    """

    def __init__(self, boundary: bytes, most_bytes: int) -> None:
        self._mark = b"--" + boundary.removeprefix(b"--")
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._looked = 0  # bytes of ``_held`` in which no boundary begins
        self._length: int | None = None  # of the part under way
        self._inside = False  # a part, behind its headers
        self.ended = False  # by the closing boundary

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The parts that are whole by the end of ``data``. InvalidRequest or PartTooLarge."""
        self._held += data
        while not self.ended:
            part = self._body() if self._inside else self._head()
            if part is None:
                return
            if part:
                yield part

    def _head(self) -> bytes | None:
        """Go behind a part's headers; b"" when there. None when they are not whole."""
        del self._held[: len(self._held) - len(self._held.lstrip(b"\r\n"))]
        if self._held.startswith(self._mark + b"--"):
            self.ended = True
            return None
        match = re.search(rb"\r?\n\r?\n", self._held)
        if (match.start() if match else len(self._held)) > MOST_HEAD:
            raise InvalidRequest("the body has no headers of a part where they should stand")
        if match is None:
            return None
        first, *lines = bytes(self._held[: match.start()]).splitlines()
        if first.rstrip() != self._mark:
            raise InvalidRequest("the body has no boundary where one should stand: that of its Content-Type")
        self._length = self._declared(lines)
        del self._held[: match.end()]
        self._inside, self._looked = True, 0
        return b""

    def _declared(self, lines: list[bytes]) -> int | None:
        for line in lines:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                if not value.strip().isdigit() or len(value.strip()) > 18:
                    raise InvalidRequest("a part's Content-Length is no number")
                if int(value) > self._most_bytes:
                    raise self._too_large()
                return int(value) or None
        return None

    def _body(self) -> bytes | None:
        """Take a part off what is held; None when it is not whole."""
        if self._length is not None:
            if len(self._held) < self._length:
                return None
            return self._take(self._length)
        at = self._held.find(b"\n" + self._mark, self._looked)
        if at < 0:
            self._looked = max(0, len(self._held) - len(self._mark))
            if len(self._held) > self._most_bytes + len(self._mark) + 2:
                raise self._too_large()
            return None
        end = at - 1 if at and self._held[at - 1] == 0x0D else at
        if end > self._most_bytes:
            raise self._too_large()
        return self._take(end)

    def _take(self, count: int) -> bytes:
        part = bytes(self._held[:count])
        del self._held[:count]
        self._inside = False
        return part

    def _too_large(self) -> PartTooLarge:
        return PartTooLarge(f"a frame is larger than {self._most_bytes} bytes (max_frame_bytes)")
