"""Pillow's many modes to 8-bit RGB in sRGB."""

import io

import numpy as np
from PIL import Image, ImageCms

Colour = tuple[int, int, int]

# TIFF tags and a value of one (TIFF 6.0, section 8).
BITS, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339
WHITE_IS_ZERO = 0

_SRGB = ImageCms.createProfile("sRGB")


def to_rgb(image: Image.Image, background: Colour) -> Image.Image:
    """Mode RGB: more than 8 bits scaled, colours converted from the embedded profile, no transparency."""
    image = _to_eight_bits(image)
    profile = image.info.get("icc_profile")
    if has_transparency(image):
        image = image.convert("RGBA")
        return on_background(_alpha_kept(image, profile) if profile else image, background)
    if image.mode == "P":
        image = image.convert("RGB")
    return _to_srgb(image, profile)


def has_transparency(image: Image.Image) -> bool:
    return (
        "A" in image.getbands() or image.mode in ("La", "RGBa") or image.info.get("transparency") is not None
    )


def on_background(image: Image.Image, background: Colour) -> Image.Image:
    """An RGBA picture over one colour, as RGB."""
    under = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(under, image).convert("RGB")


def _alpha_kept(image: Image.Image, profile: bytes) -> Image.Image:
    colours = _to_srgb(image.convert("RGB"), profile)
    colours.putalpha(image.getchannel("A"))
    return colours


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
    values = _values(image).astype(np.float32)
    unit = values / 65535 if image.mode.startswith("I;16") else _unit_range(values, image.mode)
    if _tag(image, PHOTOMETRIC) == WHITE_IS_ZERO:
        unit = 1 - unit
    grey = Image.fromarray((unit * 255 + 0.5).astype(np.uint8))
    grey.info = {k: v for k, v in image.info.items() if k == "icc_profile"}
    return grey


def _values(image: Image.Image) -> np.ndarray:
    """Pillow has no unsigned mode of 32 bits: it shows such a TIFF as signed."""
    values = np.asarray(image)
    unsigned = image.mode == "I" and (_tag(image, BITS), _tag(image, SAMPLE_FORMAT)) == (32, 1)
    return values.view(np.uint32) if unsigned else values


def _tag(image: Image.Image, number: int) -> int | None:
    """A TIFF tag's first value; None where it is missing or the picture is no TIFF."""
    value = getattr(image, "tag_v2", {}).get(number)
    return value[0] if isinstance(value, tuple) else value


def _unit_range(values: np.ndarray, mode: str) -> np.ndarray:
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    tops = (1.0, 255.0, 65535.0) if mode == "F" else (65535.0,)
    for top in tops:
        if low >= 0 and high <= top:
            return values / np.float32(top)
    span = high - low
    return (values - low) / span if span else np.zeros_like(values)
