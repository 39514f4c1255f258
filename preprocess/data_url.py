"""Data URLs (RFC 2397) and base64, as senders really write them."""

import binascii
import re
from urllib.parse import unquote, unquote_to_bytes

from mmserve.core.errors import MediaError

HEAD_CHARS = 4096  # what stands before the comma is never longer in earnest
STEP = 1 << 16  # characters decoded between two chances for other threads to run; a multiple of four
FRAME_TYPES = frozenset({"video/jpeg", "video/jpg", "video/png", "video/webp"})

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BLANKS = b" \t\r\n\f\v"


def decode_data_url(ref: str, limit: int) -> bytes:
    """The content of a data URL. No type, parameters, white space, either alphabet: all pass.

    MediaError if there are more than ``limit`` bytes, none, or no way to read them.
    """
    start, parameters = _head(ref)
    _check_length(len(ref) - start, limit)
    data = _base64(ref, start) if "base64" in parameters else unquote_to_bytes(ref[start:])
    return _checked(data, limit)


def decode_frames(ref: str, limit: int, most: int) -> tuple[bytes, ...]:
    """The pictures of ``data:video/jpeg;base64,f1,f2,...``, one a frame; of limited number and bytes."""
    start, _ = _head(ref)
    _check_length(len(ref) - start, limit)
    texts = ref[start:].split(",", most)
    if len(texts) > most:
        raise MediaError(f"the data URL holds more than {most} frames, the most that is allowed")
    frames = tuple(decode_base64(text) for text in texts)
    if not all(frames):
        raise MediaError(f"frame {[bool(f) for f in frames].index(False)} of the data URL is empty")
    if sum(map(len, frames)) > limit:
        raise too_large(limit)
    return frames


def holds_frames(ref: str) -> bool:
    """Whether a data URL holds the pictures of a clip, each by itself, rather than a file."""
    kind, *parameters = _fields(ref[: _comma(ref)])
    return kind in FRAME_TYPES and "base64" in parameters


def decode_base64(text: str) -> bytes:
    """Base64 in either alphabet, percent-encoded or not, with white space, with or without padding."""
    return _base64(text, 0)


def too_large(limit: int) -> MediaError:
    return MediaError(f"the media has more than {limit} bytes, the most that is allowed")


# ---------------------------------------------------------------- the head


def _head(ref: str) -> tuple[int, list[str]]:
    """Where the content begins, and the parameters before it in lower case."""
    comma = _comma(ref)
    if comma < 0 or ref[:5].lower() != "data:":
        raise MediaError("the data URL has no comma between its type and its content")
    return comma + 1, _fields(ref[:comma])[1:]


def _comma(ref: str) -> int:
    """Where the head ends: at the first comma that does not stand in a quoted parameter."""
    head = ref[:HEAD_CHARS]
    first = at = head.find(",")
    quoted = [match.span() for match in _QUOTED.finditer(head)] if '"' in head[:first] else []
    while at >= 0 and any(start < at < end for start, end in quoted):
        at = head.find(",", at + 1)
    return at if at >= 0 else first


def _fields(head: str) -> list[str]:
    """The media type and the parameters, in lower case, without what is quoted."""
    return [field.strip().lower() for field in _QUOTED.sub("", head[5:]).split(";")]


def _check_length(chars: int, limit: int) -> None:
    if chars > 4 * limit + 1024:  # percent-encoding takes three characters a byte; white space is on top
        raise too_large(limit)


def _checked(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise too_large(limit)
    if not data:
        raise MediaError("the data URL is empty")
    return data


# ---------------------------------------------------------------- base64


def _base64(text: str, start: int) -> bytes:
    """Clean standard base64 is decoded as it lies; what is not is cleaned first, at the price of copies."""
    try:
        try:
            return _decode(text, start)
        except binascii.Error:
            return _decode(_cleaned(text[start:]), 0)
    except ValueError:
        raise MediaError("the content is not valid base64") from None


def _decode(text: str | bytes, start: int) -> bytes:
    """Strictly, in pieces: a conversion holds the interpreter's lock from its beginning to its end."""
    pieces = [
        binascii.a2b_base64(text[at : at + STEP], strict_mode=True) for at in range(start, len(text), STEP)
    ]
    if any(len(piece) != STEP // 4 * 3 for piece in pieces[:-1]):
        raise binascii.Error("padding before the end")
    return b"".join(pieces)


def _cleaned(text: str) -> bytes:
    """The standard alphabet with its padding, without white space."""
    raw = (unquote(text) if "%" in text else text).encode("ascii")
    raw = raw.translate(_URL_SAFE, _BLANKS).rstrip(b"=")
    return raw + b"=" * (-len(raw) % 4)
