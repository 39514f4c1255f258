"""Clips to vision items: sampled by time, decoded and resized one frame at a time."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import av
import numpy as np
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess.budget import clip_size
from mmserve.preprocess.image import check_size
from mmserve.preprocess.media import Medium, Seen, item_digest
from mmserve.preprocess.resize import resize
from mmserve.preprocess.sampling import frame_count, frame_indices, nearest_frames
from mmserve.preprocess.spec import ProcessorSpec

# Containers that hold their own frames; none that points to other files or addresses.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,asf,flv,ogg,gif,apng,h264,hevc,av1,obu,"
    "ivf,yuv4mpegpipe,mjpeg,nut,mxf"
)
DECODER_THREADS = 2
FALLBACK_RATE = 25.0  # frames a second where the file does not say
PRECUT_RATE = 2.0  # frames a second of pictures sent as a clip without times


@dataclass(frozen=True)
class Timeline:
    """The frames a file holds, in the order they are shown.

    ``keys`` are what a decoded frame is recognised by (its presentation time in the stream's clock, or its
    number where the file has no times), ``times`` their seconds from the first, ``rate`` frames a second.
    """

    keys: tuple[int, ...]
    times: tuple[float, ...]
    rate: float


@dataclass
class Clip:
    """Frames that were picked: uint8 RGB of one size, one at a time, and what became known on the way."""

    format: str
    rate: float
    total: int
    planned: int
    times: list[float] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)
    source_size: tuple[int, int] = (0, 0)
    warnings: list[str] = field(default_factory=list)


def read_video(part: VideoPart, spec: ProcessorSpec, options: MediaOptions) -> Medium:
    """Sample, decode and resize a clip. MediaError for what is no readable clip within the limits."""
    if part.frames is not None:
        return _to_medium(_precut(part, spec, options), spec)
    if part.timestamps is not None:
        raise MediaError("timestamps are for clips given as frames; a video file has its own times")
    data = part.data
    if not data:
        raise MediaError("the video is empty (0 bytes)")
    if len(data) > options.max_video_bytes:
        raise MediaError(f"the video has {len(data)} bytes; at most {options.max_video_bytes} are allowed")
    return _to_medium(_decode(data, part, spec, options), spec)


# ---------------------------------------------------------------- frames that were cut already


def _precut(part: VideoPart, spec: ProcessorSpec, options: MediaOptions) -> Clip:
    frames = part.frames
    assert frames is not None
    _check_frames(frames, options)
    times = _precut_times(part, len(frames))
    span = times[-1] - times[0]
    rate = (len(times) - 1) / span if span > 0 else part.fps or PRECUT_RATE
    picks = np.arange(len(frames))
    asked = part.num_frames is not None or (part.fps is not None and part.timestamps is not None)
    most = min(options.max_video_frames, spec.frames.max_frames)
    if asked or len(frames) > most:
        count = frame_count(len(frames), rate, spec, part.fps if asked else rate, part.num_frames, most)
        picks = nearest_frames(times, frame_indices(len(frames), count, spec))
    clip = Clip("frames", rate, len(frames), len(picks), source_size=(frames.shape[1], frames.shape[2]))
    size = clip_size(len(picks), *clip.source_size, spec, part.min_pixels, part.max_pixels)
    for i in picks:
        clip.times.append(times[i])
        clip.frames.append(resize(Image.fromarray(np.ascontiguousarray(frames[i])), size))
    return clip


def _check_frames(frames: np.ndarray, options: MediaOptions) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise MediaError(
            f"frames must be uint8 [frames, height, width, 3], not {frames.dtype} {list(frames.shape)}"
        )
    check_size(frames.shape[1], frames.shape[2], options)


def _precut_times(part: VideoPart, count: int) -> list[float]:
    if part.timestamps is None:
        return [i / (part.fps or PRECUT_RATE) for i in range(count)]
    times = list(part.timestamps)
    if len(times) != count:
        raise MediaError(f"there are {count} frames but {len(times)} timestamps")
    if not np.isfinite(times).all() or any(b <= a for a, b in pairwise(times)):
        raise MediaError("timestamps must be finite and increase from frame to frame")
    return times


# ---------------------------------------------------------------- files


def _decode(data: bytes, part: VideoPart, spec: ProcessorSpec, options: MediaOptions) -> Clip:
    line = _timeline(data, options)
    total = len(line.keys)
    count = frame_count(total, line.rate, spec, part.fps, part.num_frames, options.max_video_frames)
    picks = nearest_frames(line.times, frame_indices(total, count, spec))
    with _open(data) as container:
        clip = Clip(container.format.name.split(",")[0], line.rate, total, len(picks))
        _collect(container, _video_stream(container, options), line, picks, clip, part, spec)
    if not clip.frames:
        raise MediaError("no frame of the video can be decoded")
    return clip


def _open(data: bytes) -> Any:
    """Open our bytes and nothing else: protocols are off, as are formats that refer to other files."""
    guards = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    try:
        return av.open(io.BytesIO(data), options=guards, metadata_errors="replace")
    except (av.FFmpegError, ValueError, OSError) as error:
        raise MediaError(f"this is not a video that can be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]


def _video_stream(container: Any, options: MediaOptions) -> Any:
    """The first one, whose decoder leaves out frames beyond the pixel limit (a stream may change size)."""
    streams = [s for s in container.streams.video if not s.disposition & s.disposition.attached_pic]
    if not streams:
        found = ", ".join(sorted({s.type for s in container.streams})) or "nothing"
        raise MediaError(f"the file holds no video stream (it holds: {found})")
    stream = streams[0]
    if stream.codec_context is None:
        raise MediaError("the video's codec is not supported")
    stream.thread_type = "AUTO"
    stream.codec_context.thread_count = DECODER_THREADS
    stream.codec_context.options = {"max_pixels": str(options.max_image_pixels)}
    return stream


def _timeline(data: bytes, options: MediaOptions) -> Timeline:
    """Read the packets' times, without decoding; decode and count where a container has none."""
    with _open(data) as container:
        stream = _video_stream(container, options)
        if stream.width and stream.height:
            check_size(stream.height, stream.width, options)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        tick = float(stream.time_base or 0)
        keys = _packet_times(container, stream)
        if keys is not None:
            return _timed(keys, tick, rate)
    with _open(data) as container:
        stream = _video_stream(container, options)
        keys = sorted({key for key, _ in _frames(container, stream, [])})
        return _timed(keys, tick if tick and _is_timed(keys) else 0.0, rate)


def _packet_times(container: Any, stream: Any) -> list[int] | None:
    """Presentation times of all packets that will be shown, sorted; None if any has none."""
    times = []
    try:
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.pts is None:
                return None
            times.append(packet.pts)
    except (av.FFmpegError, OSError):
        pass  # a truncated tail: what was read until here is the clip
    return sorted(set(times)) or None


def _is_timed(keys: list[int]) -> bool:
    return keys != list(range(len(keys)))


def _timed(keys: list[int], tick: float, rate: float) -> Timeline:
    if not keys:
        raise MediaError("no frame of the video can be decoded")
    if not tick:
        rate = rate or FALLBACK_RATE
        return Timeline(tuple(keys), tuple(i / rate for i in range(len(keys))), rate)
    times = [(key - keys[0]) * tick for key in keys]
    measured = (len(times) - 1) / times[-1] if times[-1] > 0 else 0.0
    if not rate or (measured and abs(rate - measured) > 0.02 * measured):
        rate = measured or rate or FALLBACK_RATE
    even = [i / rate for i in range(len(times))]
    if all(abs(a - b) <= tick * 1.01 for a, b in zip(times, even, strict=True)):
        times = even  # constant rate within the clock's precision: the exact times
    return Timeline(tuple(keys), tuple(times), rate)


def _packets(container: Any, stream: Any, damage: list[str]) -> Iterator[Any]:
    """The file's packets, and last one that makes the decoder give out what it still holds."""
    try:
        yield from container.demux(stream)
    except (av.FFmpegError, OSError) as error:
        damage.append(_reason(error))
        yield None


def _frames(container: Any, stream: Any, damage: list[str]) -> Iterator[tuple[int, Any]]:
    """Decoded frames with their keys; packets that cannot be decoded are left out and noted."""
    number = 0
    for packet in _packets(container, stream, damage):
        try:
            decoded = stream.decode(packet)
        except av.EOFError:
            return
        except (av.FFmpegError, OSError) as error:
            damage.append(_reason(error))
            continue
        for frame in decoded:
            yield (frame.pts if frame.pts is not None else number), frame
            number += 1


def _collect(
    container: Any,
    stream: Any,
    line: Timeline,
    picks: np.ndarray,
    clip: Clip,
    part: VideoPart,
    spec: ProcessorSpec,
) -> None:
    """Decode up to the last frame picked. Where one is missing, the next readable one stands for it."""
    seconds = dict(zip(line.keys, line.times, strict=True))
    wanted = [line.keys[i] for i in picks]
    damage: list[str] = []
    size: tuple[int, int] | None = None
    at = 0
    for key, frame in _frames(container, stream, damage):
        if key < wanted[at]:
            continue
        image = _upright(frame)
        if size is None:
            clip.source_size = (image.height, image.width)
            size = clip_size(len(wanted), *clip.source_size, spec, part.min_pixels, part.max_pixels)
        clip.frames.append(resize(image, size))
        clip.times.append(seconds.get(key, line.times[picks[at]]))
        while at < len(wanted) and wanted[at] <= key:
            at += 1
        if at == len(wanted):
            break
    _note_damage(clip, damage)


def _note_damage(clip: Clip, damage: list[str]) -> None:
    missing = clip.planned - len(clip.frames)
    if damage:
        clip.warnings.append(f"{len(damage)} packets could not be decoded ({damage[0]})")
    if missing and clip.frames:
        clip.warnings.append(f"{missing} of {clip.planned} frames could not be read")


def _upright(frame: Any) -> Image.Image:
    pixels = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return Image.fromarray(np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels)


# ---------------------------------------------------------------- frames to items


def _to_medium(clip: Clip, spec: ProcessorSpec) -> Medium:
    """Pair the frames (the last one repeated where one is missing); a pair's time is the mean of its own."""
    kept = tuple(clip.times)
    step = spec.temporal_patch
    spare = -len(clip.frames) % step
    frames = clip.frames + clip.frames[-1:] * spare
    times = clip.times + clip.times[-1:] * spare
    pixels = tuple(_stacked(frames[i : i + step]) for i in range(0, len(frames), step))
    height, width = frames[0].shape[:2]
    grid = (height // spec.patch, width // spec.patch)
    sampled_rate = len(kept) / clip.total * clip.rate
    return Medium(
        kind="video",
        grid=grid,
        pixels=pixels,
        digests=tuple(item_digest(p, spec) for p in pixels),
        timestamps=tuple((times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)),
        seconds_per_grid=step / sampled_rate,
        seen=Seen(
            kind="video",
            format=clip.format,
            source_size=clip.source_size,
            size=(height, width),
            grid=grid,
            tokens=len(pixels) * grid[0] * grid[1] // spec.merge**2,
            timestamps=kept,
            warnings=tuple(clip.warnings),
        ),
    )


def _stacked(frames: list[np.ndarray]) -> np.ndarray:
    pixels = np.stack(frames)
    pixels.setflags(write=False)
    return pixels
