"""Picture files to upright RGB.

The contract: the type is found from the content, never from a name; limits are checked from the header,
before anything is decoded; orientation is always applied; transparency is composited on one background;
more than 8 bits are scaled, not clipped; colour profiles are converted to sRGB; of an animation the
first frame is taken. Whatever is wrong with a file is a MediaError that says so.
"""

import io
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageColor, UnidentifiedImageError

from mmserve.core.config import MediaOptions
from mmserve.core.errors import ConfigError, MediaError, MMServeError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")  # JPEG covers MPO
NAMES = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or PPM"

# Signatures of what people send by mistake: (offset, bytes, what it is).
FOREIGN = (
    (0, b"\0\0\1\0", "an icon (ICO)"),
    (4, b"ftyphei", "a HEIC picture"),
    (4, b"ftypmif1", "a HEIF picture"),
    (4, b"ftyp", "an MP4 video; send it as a video"),
    (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM video; send it as a video"),
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

_SRGB = ImageCms.createProfile("sRGB")


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


def decode_image(
    data: bytes, options: MediaOptions, background: tuple[int, int, int] | None = None
) -> Picture:
    """Decode a picture file. MediaError for everything that is not a readable picture within the limits.

    ``background`` is the RGB colour under transparent pixels, that of ``options`` if not given.
    """
    if not data:
        raise MediaError("the picture is empty (0 bytes)")
    if len(data) > options.max_image_bytes:
        raise MediaError(f"the picture has {len(data)} bytes; at most {options.max_image_bytes} are allowed")
    try:
        with _open(data) as image:
            check_size(image.height, image.width, options)
            image.load()
            orientation = _orientation(image)
            picture = _to_rgb(image, background or background_color(options))
            if orientation in UPRIGHT:
                picture = picture.transpose(UPRIGHT[orientation])
            return Picture(picture, str(image.format), orientation)
    except MMServeError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"the picture is too large: {error}") from None
    except Exception as error:  # Pillow's plug-ins raise anything at all on damaged files
        raise MediaError(f"the picture cannot be decoded: {_reason(error)}") from None


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


def background_color(options: MediaOptions) -> tuple[int, int, int]:
    """The colour under transparent pixels; ConfigError when its name is unknown."""
    try:
        return ImageColor.getrgb(options.background)[:3]
    except ValueError:
        raise ConfigError(
            f"background must be a colour name or #rrggbb, not {options.background!r}", param="background"
        ) from None


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise MediaError(f"this is not a picture that can be read{_guess(data)}; send {NAMES}") from None


def _guess(data: bytes) -> str:
    head = data[:64].lstrip()
    for offset, magic, what in FOREIGN:
        if data[offset : offset + len(magic)] == magic or (offset == 0 and head.startswith(magic)):
            return f": it looks like {what}"
    return ""


def _reason(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def _orientation(image: Image.Image) -> int:
    try:
        value = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # a damaged EXIF block says nothing about the picture
        return 1
    return value if 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    image = _to_eight_bits(image)
    profile = image.info.get("icc_profile")
    if "A" in image.getbands() or image.mode in ("La", "RGBa") or image.info.get("transparency") is not None:
        return _composited(image.convert("RGBA"), background, profile)
    if image.mode == "P":
        image = image.convert("RGB")
    return _to_srgb(image, profile)


def _composited(image: Image.Image, background: tuple[int, int, int], profile: bytes | None) -> Image.Image:
    if profile:
        alpha = image.getchannel("A")
        image = _to_srgb(image.convert("RGB"), profile)
        image.putalpha(alpha)
    under = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(under, image).convert("RGB")


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert from the embedded profile; a profile that is damaged or of another colour model is ignored."""
    if not profile:
        return _plain_rgb(image)
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" in ImageCms.getProfileDescription(source).lower():
            return _plain_rgb(image)
        converted = ImageCms.profileToProfile(image, source, _SRGB, outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):
        return _plain_rgb(image)
    return converted if converted is not None else _plain_rgb(image)


def _plain_rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Integer and float greys scaled to 0..255.

    16 bits by 257. 32 bits and floats: 0..1, 0..255 or 0..65535, whichever the largest value fits, and
    from smallest to largest where it fits none of them.
    """
    if not (image.mode.startswith("I") or image.mode == "F"):
        return image
    values = np.asarray(image).astype(np.float32)
    scaled = values / 257 if image.mode.startswith("I;16") else _unit_range(values, image.mode) * 255
    grey = Image.fromarray((scaled + 0.5).astype(np.uint8))
    grey.info = {k: v for k, v in image.info.items() if k == "icc_profile"}
    return grey


def _unit_range(values: np.ndarray, mode: str) -> np.ndarray:
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    tops = (1.0, 255.0, 65535.0) if mode == "F" else (65535.0,)
    for top in tops:
        if low >= 0 and high <= top:
            return values / np.float32(top)
    span = high - low
    return (values - low) / span if span else np.zeros_like(values)
