"""Picture files to upright RGB.

The contract: the type is found from the content, never from a name; limits are checked from the header,
before anything is decoded; orientation is always applied; transparency is composited on one background;
more than 8 bits are scaled, not clipped; colour profiles are converted to sRGB; of an animation the
first frame is taken. Whatever is wrong with a file is a MediaError that says so.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageColor, UnidentifiedImageError

from mmserve.core.config import MediaOptions
from mmserve.core.errors import ConfigError, MediaError, MMServeError
from mmserve.preprocess.heif import HEIF, is_heif, load_heif
from mmserve.preprocess.pixels import Colour, to_rgb
from mmserve.preprocess.work import Cancelled

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")  # JPEG covers MPO
NAMES = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, HEIC or PPM"

# Signatures for the message about what cannot be read: (offset, bytes, what it is).
KNOWN = (
    (0, b"\0\0\1\0", "an icon (ICO)"),
    (0, b"\xff\xd8\xff", "a JPEG picture that is damaged"),
    (0, b"\x89PNG", "a PNG picture that is damaged"),
    (0, b"GIF8", "a GIF picture that is damaged"),
    (8, b"WEBP", "a WebP picture that is damaged"),
    (0, b"BM", "a BMP picture that is damaged or of a kind that is not supported"),
    (0, b"II*\0", "a TIFF picture that is damaged or of a kind that is not supported"),
    (0, b"MM\0*", "a TIFF picture that is damaged or of a kind that is not supported"),
    (4, b"ftypavi", "an AVIF picture that is damaged"),
    (4, b"ftyphei", "a HEIC picture that is damaged"),
    (4, b"ftypmif1", "a HEIF picture that is damaged"),
    (4, b"ftyp", "an MP4 video; send it as a video"),
    (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM video; send it as a video"),
    (4, b"jP  ", "a JPEG 2000 picture"),
    (4, b"JXL ", "a JPEG XL picture"),
    (0, b"\xff\x0a", "a JPEG XL picture"),
    (0, b"%PDF", "a PDF document"),
    (0, b"<svg", "an SVG drawing"),
    (0, b"<?xml", "an XML document"),
    (0, b"<!DOCTYPE", "an HTML page"),
    (0, b"<html", "an HTML page"),
)

# EXIF orientation -> what turns the stored picture upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Picture:
    """An upright 8-bit RGB picture, the format it came in and the EXIF orientation that was undone."""

    image: Image.Image
    format: str
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.image.height, self.image.width

    @property
    def pixels(self) -> np.ndarray:
        """uint8 [H, W, 3]."""
        return np.asarray(self.image)


def decode_image(data: bytes, options: MediaOptions, background: Colour | None = None) -> Picture:
    """Decode a picture file. MediaError for everything that is not a readable picture within the limits.

    ``background`` is the RGB colour under transparent pixels, that of ``options`` if not given.
    """
    if not data:
        raise MediaError("the picture is empty (0 bytes)")
    if len(data) > options.max_image_bytes:
        raise MediaError(f"the picture has {len(data)} bytes; at most {options.max_image_bytes} are allowed")
    with reading(), open_picture(data) as image:
        check_size(image.height, image.width, options)
        told = _orientation(image.info.get("original_orientation")) or _exif(image)
        image.load()
        left = _exif(image)  # 1 where the decoder has turned the picture itself
        picture = to_rgb(image, background or background_color(options))
        if left in UPRIGHT:
            picture = picture.transpose(UPRIGHT[left])
        return Picture(picture, str(image.format), left if left in UPRIGHT else told)


def from_pixels(pixels: np.ndarray, options: MediaOptions) -> Picture:
    """A picture that is decoded already: uint8 RGB [H, W, 3]."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise MediaError(f"pixels must be uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    check_size(pixels.shape[0], pixels.shape[1], options)
    return Picture(Image.fromarray(np.ascontiguousarray(pixels)), "RGB")


def check_size(height: int, width: int, options: MediaOptions) -> None:
    """MediaError when a picture or frame has no pixels, or more than is allowed."""
    if height < 1 or width < 1:
        raise MediaError(f"the picture is {width}x{height}: it has no pixels")
    if height * width > options.max_image_pixels:
        raise MediaError(
            f"the picture is {width}x{height}, {height * width} pixels;"
            f" at most {options.max_image_pixels} are allowed"
        )


def background_color(options: MediaOptions) -> Colour:
    """The colour under transparent pixels; ConfigError when its name is unknown."""
    try:
        return ImageColor.getrgb(options.background)[:3]
    except ValueError:
        raise ConfigError(
            f"background must be a colour name or #rrggbb, not {options.background!r}", param="background"
        ) from None


def open_picture(data: bytes) -> Image.Image:
    """Read the header; nothing is decoded yet. MediaError when it is none of the formats."""
    heif = is_heif(data)
    if heif:
        load_heif()
    try:
        return Image.open(io.BytesIO(data), formats=(HEIF,) if heif else FORMATS)
    except UnidentifiedImageError:
        raise MediaError(f"this is not a picture that can be read{_guess(data)}; send {NAMES}") from None


@contextmanager
def reading() -> Iterator[None]:
    """Whatever a decoder raises becomes a MediaError."""
    try:
        yield
    except (MMServeError, Cancelled, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"the picture is too large: {error}") from None
    except Exception as error:  # Pillow's plug-ins raise anything at all on damaged files
        raise MediaError(f"the picture cannot be decoded: {_reason(error)}") from None


def _guess(data: bytes) -> str:
    head = data[:64].lstrip()
    for offset, magic, what in KNOWN:
        if data[offset : offset + len(magic)] == magic or (offset == 0 and head.startswith(magic)):
            return f": it looks like {what}"
    return ""


def _reason(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def _exif(image: Image.Image) -> int:
    try:
        return _orientation(image.getexif().get(ExifTags.Base.Orientation)) or 1
    except Exception:  # a damaged EXIF block says nothing about the picture
        return 1


def _orientation(value: Any) -> int | None:
    """1 to 8, or None for anything else."""
    return value if value in range(1, 9) else None
