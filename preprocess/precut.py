"""Clips that come as frames: uint8 arrays, or encoded pictures, one a frame."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess.clip import Clip
from mmserve.preprocess.image import check_size, decode_image
from mmserve.preprocess.media import Medium
from mmserve.preprocess.sampling import choose_frames
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.work import Work

PRECUT_RATE = 2.0  # frames a second of pictures sent as a clip without times


def read_frames(
    part: VideoPart, frames: np.ndarray, spec: ProcessorSpec, options: MediaOptions, work: Work
) -> Medium:
    """Frames uint8 RGB [F, H, W, 3], at the part's own times."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise MediaError(
            f"frames must be uint8 [frames, height, width, 3], not {frames.dtype} {list(frames.shape)}"
        )
    check_size(frames.shape[1], frames.shape[2], options)
    times, rate = _clock(part, len(frames))
    picks = _picks(part, times, rate, spec, options)
    clip = Clip(part, spec, work, len(picks))
    for i in picks:
        clip.add(Image.fromarray(np.ascontiguousarray(frames[i])), times[i])
    return clip.finish("frames", rate, len(frames), ())


def read_pictures(
    part: VideoPart, pictures: Sequence[bytes], spec: ProcessorSpec, options: MediaOptions, work: Work
) -> Medium:
    """Encoded pictures of one size, one a frame, at the part's own times. MediaError counts them from 0.

    Only the pictures that are kept are decoded.
    """
    if not pictures:
        raise MediaError("the clip has no pictures")
    whole = sum(map(len, pictures))
    if whole > options.max_video_bytes:
        raise MediaError(
            f"the clip's pictures have {whole} bytes; at most {options.max_video_bytes} are allowed"
        )
    times, rate = _clock(part, len(pictures))
    picks = _picks(part, times, rate, spec, options)
    clip = Clip(part, spec, work, len(picks))
    for i in picks:
        with work.stages.timing("decode"):
            picture = _picture(pictures[i], i, clip, options)
        clip.add(picture, times[i])
    return clip.finish("pictures", rate, len(pictures), ())


def _picture(data: bytes, index: int, clip: Clip, options: MediaOptions) -> Image.Image:
    try:
        picture = decode_image(data, options)
    except MediaError as error:
        raise MediaError(f"picture {index} of the clip: {error.message}") from None
    if clip.times and picture.size != clip.source_size:
        (height, width), (first_height, first_width) = picture.size, clip.source_size
        raise MediaError(
            f"picture {index} of the clip is {width}x{height}, the first {first_width}x{first_height};"
            " all must have one size"
        )
    return picture.image


def _clock(part: VideoPart, count: int) -> tuple[list[float], float]:
    """Seconds of each of ``count`` frames, and their mean rate."""
    times = _times(part, count)
    span = times[-1] - times[0]
    return times, (count - 1) / span if span > 0 else part.fps or PRECUT_RATE


def _times(part: VideoPart, count: int) -> list[float]:
    if part.timestamps is None:
        return [i / (part.fps or PRECUT_RATE) for i in range(count)]
    times = list(part.timestamps)
    if len(times) != count:
        raise MediaError(f"there are {count} frames but {len(times)} timestamps")
    if not np.isfinite(times).all() or any(b <= a for a, b in pairwise(times)):
        raise MediaError("timestamps must be finite and increase from frame to frame")
    return times


def _picks(
    part: VideoPart, times: list[float], rate: float, spec: ProcessorSpec, options: MediaOptions
) -> list[int]:
    """All frames, unless fewer are asked for or the model takes fewer."""
    total = len(times)
    most = min(options.max_video_frames, spec.frames.max_frames)
    asked = part.num_frames is not None or (part.fps is not None and part.timestamps is not None)
    if not asked and total <= most:
        return list(range(total))
    fps = part.fps if asked else rate
    return choose_frames(times, rate, spec, fps=fps, num_frames=part.num_frames, most=most)
