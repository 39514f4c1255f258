"""How many pixels a picture or a clip may have, from the model's budget and the request's own limits."""

from mmserve.core.errors import MediaError
from mmserve.preprocess.resize import smart_resize, smart_resize_clip
from mmserve.preprocess.spec import PixelBudget, ProcessorSpec

MOST_TOKENS = 16384  # of one picture, where a request asks for more than the model's own budget
MOST_CLIP_TOKENS = 262_144  # of one clip: the longest context of the model families


def image_size(
    height: int,
    width: int,
    spec: ProcessorSpec,
    low: int | None = None,
    high: int | None = None,
    ceiling: int | None = None,
) -> tuple[int, int]:
    """(height, width) of a picture after the resize.

    ``low`` and ``high``, the request's own ``min_pixels`` and ``max_pixels``, replace the model's; above
    the model's budget they reach at most ``MOST_TOKENS`` and ``ceiling`` pixels.
    """
    check_pixel_limits(low, high)
    most = min(high or max(spec.image.max_pixels, low or 0), _most_pixels(spec, spec.image))
    most = min(most, ceiling or most)
    least = min(low or spec.image.min_pixels, most)
    return smart_resize(height, width, factor=spec.factor, min_pixels=least, max_pixels=most)


def clip_size(
    frames: int, height: int, width: int, spec: ProcessorSpec, low: int | None = None, high: int | None = None
) -> tuple[int, int]:
    """(height, width) of a clip's frames after the resize.

    ``low`` and ``high`` are the request's own ``min_pixels`` and ``max_pixels``, of one frame. The model's
    budget is of one frame for Qwen2-VL and Qwen2.5-VL, of the whole clip for Qwen3-VL; there the
    request's limits can only tighten it. MediaError for a clip that is too much for any context.
    """
    check_pixel_limits(low, high)
    size = _clip_size(frames, height, width, spec, low, high)
    tokens = -(-frames // spec.temporal_patch) * size[0] * size[1] // spec.factor**2
    if tokens > MOST_CLIP_TOKENS:
        raise MediaError(
            f"the clip takes {tokens} vision tokens ({frames} frames of {size[1]}x{size[0]});"
            f" at most {MOST_CLIP_TOKENS} fit; lower fps, num_frames, min_pixels or max_pixels"
        )
    return size


def _clip_size(
    frames: int, height: int, width: int, spec: ProcessorSpec, low: int | None, high: int | None
) -> tuple[int, int]:
    if spec.family != "qwen3_vl":
        budget = _frame_budget(frames, spec, low, high)
        return smart_resize(
            height, width, factor=spec.factor, min_pixels=budget.min_pixels, max_pixels=budget.max_pixels
        )
    budget = _whole_budget(frames, spec, low, high)
    return smart_resize_clip(
        frames,
        height,
        width,
        factor=spec.factor,
        temporal=spec.temporal_patch,
        min_pixels=budget.min_pixels,
        max_pixels=budget.max_pixels,
    )


def check_pixel_limits(low: int | None, high: int | None) -> None:
    """MediaError when a request's ``min_pixels`` and ``max_pixels`` are not positive and in order."""
    for name, value in (("min_pixels", low), ("max_pixels", high)):
        if value is not None and value < 1:
            raise MediaError(f"{name} must be at least 1, not {value}")
    if low is not None and high is not None and low > high:
        raise MediaError(f"min_pixels ({low}) must not exceed max_pixels ({high})")


def _most_pixels(spec: ProcessorSpec, budget: PixelBudget) -> int:
    return max(budget.max_pixels, MOST_TOKENS * spec.factor**2)


def _whole_budget(frames: int, spec: ProcessorSpec, low: int | None, high: int | None) -> PixelBudget:
    """Of a Qwen3-VL clip; with the cap, few frames may not take all of it."""
    most = spec.video.max_pixels
    if spec.frames.cap:
        each = min(spec.frames.max_tokens * spec.factor**2, most // frames)
        most = max(each, int(spec.video.min_pixels * 1.05)) * frames
    counted = max(frames, spec.temporal_patch)  # as ``smart_resize_clip`` counts them
    most = min(most, high * counted) if high else most
    return PixelBudget(min(low * counted if low else spec.video.min_pixels, most), most)


def _frame_budget(frames: int, spec: ProcessorSpec, low: int | None, high: int | None) -> PixelBudget:
    """Of a frame of the older families; with the cap, at most its share of nine tenths of the context."""
    most = min(high or max(spec.video.max_pixels, low or 0), _most_pixels(spec, spec.video))
    if spec.frames.cap:
        whole = int(spec.frames.max_tokens * spec.factor**2 * 0.9)
        share = whole * spec.temporal_patch // frames
        most = max(min(most, share), int(min(spec.video.min_pixels, most) * 1.05))
    return PixelBudget(min(low or spec.video.min_pixels, most), most)
