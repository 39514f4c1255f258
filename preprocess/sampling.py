"""Which frames of a clip the model sees."""

import math
from collections.abc import Sequence

import numpy as np

from mmserve.core.errors import MediaError
from mmserve.preprocess.spec import FrameRule, ProcessorSpec

EPSILON = 1e-6  # keeps a duration that is a whole number of frames from being cut by rounding


def choose_frames(
    times: Sequence[float],
    rate: float,
    spec: ProcessorSpec,
    *,
    fps: float | None,
    num_frames: int | None,
    most: int,
) -> list[int]:
    """The frames kept of a clip whose frames stand at ``times`` (increasing, in seconds), at most ``most``.

    They are chosen by time. Where the rate varies, fewer may be kept than a constant rate would give,
    unless every frame is asked for by number.
    """
    total = len(times)
    count = frame_count(total, rate, spec, fps, num_frames, most)
    if num_frames is not None and count == total:
        return list(range(total))
    return [int(i) for i in nearest_frames(times, frame_indices(total, count, spec))]


def frame_count(
    total: int, rate: float, spec: ProcessorSpec, fps: float | None, num_frames: int | None, most: int
) -> int:
    """How many of ``total`` frames at ``rate`` frames a second are kept, at most ``most``.

    The rules of transformers' video processors, made total: a clip shorter than they accept gives what
    it has. The older families keep a multiple of the temporal patch, except of a single frame.
    MediaError when both ``fps`` and ``num_frames`` are given, or one makes no sense.
    """
    _check(fps, num_frames)
    rule = spec.frames
    if num_frames is None and fps is None:
        num_frames = rule.num_frames
    wanted = num_frames if num_frames is not None else _by_rate(total, rate, fps or rule.fps, rule)
    limit = min(total, most)
    if spec.family == "qwen3_vl":
        return max(1, min(wanted, limit))
    if num_frames is not None:
        wanted = round(num_frames / spec.temporal_patch) * spec.temporal_patch
    return max(1, min(wanted, limit) // spec.temporal_patch * spec.temporal_patch)


def frame_indices(total: int, count: int, spec: ProcessorSpec) -> np.ndarray:
    """The ``count`` frames kept, as if frames stood at equal distances: int64, increasing.

    Qwen3-VL spans the clip from its first to its last frame; the older families take the first frame of
    each of ``count`` equal stretches.
    """
    if spec.family == "qwen3_vl":
        return np.linspace(0, total - 1, count).round().astype(np.int64)
    steps = np.arange(count) * (total / count)
    return steps.astype(np.float32).astype(np.int64)


def nearest_frames(times: Sequence[float], indices: np.ndarray) -> np.ndarray:
    """The frames whose times lie nearest to where frames ``indices`` would stand at a constant rate.

    ``times`` increase, in seconds. At a constant rate this is ``indices`` itself. Each frame once.
    """
    clock = np.asarray(times, np.float64)
    if len(clock) < 2 or clock[-1] <= clock[0]:
        return np.unique(np.minimum(indices, len(clock) - 1))
    place = (clock - clock[0]) / (clock[-1] - clock[0]) * (len(clock) - 1)
    right = np.clip(np.searchsorted(place, indices), 1, len(clock) - 1)
    left_is_nearer = indices - place[right - 1] < place[right] - indices
    return np.unique(right - left_is_nearer)


def _check(fps: float | None, num_frames: int | None) -> None:
    if fps is not None and num_frames is not None:
        raise MediaError("fps and num_frames exclude each other; give one of them")
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise MediaError(f"fps must be above 0, not {fps}")
    if num_frames is not None and num_frames < 1:
        raise MediaError(f"num_frames must be at least 1, not {num_frames}")


def _by_rate(total: int, rate: float, fps: float, rule: FrameRule) -> int:
    wanted = min(total / rate * fps + EPSILON, rule.max_frames)  # before int: it may be infinite
    return min(max(int(wanted), rule.min_frames), rule.max_frames)
