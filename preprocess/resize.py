"""Sizes that a model accepts, and the resize to them: Pillow's bicubic on uint8."""

import math

import numpy as np
from PIL import Image

from mmserve.core.errors import MediaError

MAX_ASPECT = 200


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) in multiples of ``factor`` with the area inside the budget and the aspect kept.

    The rule of the Qwen2-VL image processor. MediaError when one side is over 200 times the other.
    """
    _check_aspect(height, width)
    rounded = round(height / factor) * factor, round(width / factor) * factor
    area = rounded[0] * rounded[1]
    if area > max_pixels:
        return _shrunk(height, width, factor, math.sqrt(height * width / max_pixels))
    if area < min_pixels:
        return _grown(height, width, factor, math.sqrt(min_pixels / (height * width)))
    return rounded


def smart_resize_clip(
    frames: int,
    height: int,
    width: int,
    *,
    factor: int,
    temporal: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """As ``smart_resize``, with the budget spread over all frames: the rule of the Qwen3-VL video processor.

    ``frames`` is the number sampled, before the last one is repeated to fill a pair.
    """
    frames = max(frames, temporal)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    rounded = round(height / factor) * factor, round(width / factor) * factor
    volume = round(frames / temporal) * temporal * rounded[0] * rounded[1]
    if volume > max_pixels:
        return _shrunk(height, width, factor, math.sqrt(frames * height * width / max_pixels))
    if volume < min_pixels:
        return _grown(height, width, factor, math.sqrt(min_pixels / (frames * height * width)))
    return rounded


def resize(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """An RGB picture as uint8 [H, W, 3] at ``size`` = (H, W); equal to the input when it has that size."""
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC))


def resize_into(image: Image.Image, out: np.ndarray) -> None:
    """As ``resize``, to the size of ``out`` uint8 [H, W, 3] and into its memory."""
    np.copyto(out, resize(image, (out.shape[0], out.shape[1])))


def _shrunk(height: int, width: int, factor: int, beta: float) -> tuple[int, int]:
    return (
        max(factor, math.floor(height / beta / factor) * factor),
        max(factor, math.floor(width / beta / factor) * factor),
    )


def _grown(height: int, width: int, factor: int, beta: float) -> tuple[int, int]:
    return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor


def _check_aspect(height: int, width: int) -> None:
    aspect = max(height, width) / min(height, width)
    if aspect > MAX_ASPECT:
        raise MediaError(
            f"the picture is {width}x{height}, an aspect ratio of {aspect:.0f}; at most {MAX_ASPECT} works"
        )
