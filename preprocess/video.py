"""Clips to vision items: sampled by time, decoded and resized one frame at a time."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess.animation import is_animation, read_animation
from mmserve.preprocess.clip import Clip
from mmserve.preprocess.container import Source
from mmserve.preprocess.decoding import decoded
from mmserve.preprocess.frame import stretch_of, upright
from mmserve.preprocess.image import background_color
from mmserve.preprocess.media import Medium
from mmserve.preprocess.precut import read_frames, read_pictures
from mmserve.preprocess.reading import plan_reading
from mmserve.preprocess.sampling import choose_frames
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.timeline import Timeline, read_timeline
from mmserve.preprocess.work import Stages, Work

T = TypeVar("T")


def read_video(
    part: VideoPart, spec: ProcessorSpec, options: MediaOptions, work: Work | None = None
) -> Medium:
    """Sample, decode and resize a clip. MediaError for what is no readable clip within the limits.

    The pixels of all frames kept are one allocation of ``work``, asked for once.
    """
    work = work or Work()
    if part.frames is not None:
        return read_frames(part, part.frames, spec, options, work)
    if part.pictures is not None:
        return read_pictures(part, part.pictures, spec, options, work)
    if part.timestamps is not None:
        raise MediaError("timestamps are for clips given as frames; a video file has its own times")
    if not part.data:
        raise MediaError("the video is empty (0 bytes)")
    if len(part.data) > options.max_video_bytes:
        raise MediaError(
            f"the video has {len(part.data)} bytes; at most {options.max_video_bytes} are allowed"
        )
    if is_animation(part.data):
        return read_animation(part, part.data, spec, options, work)
    return _read_file(part, Source(part.data, options), spec, work)


def _read_file(part: VideoPart, source: Source, spec: ProcessorSpec, work: Work) -> Medium:
    """The times of all frames first, then only the packets that lead to the frames wanted."""
    with work.stages.timing("demux"):
        line = read_timeline(source, work.check)
    most = source.options.max_video_frames
    picks = choose_frames(line.times, line.rate, spec, fps=part.fps, num_frames=part.num_frames, most=most)
    clip = Clip(part, spec, work, len(picks))
    if line.size is not None:
        clip.size(*line.size)  # refuses before anything is decoded
    reader = FileReader(source, line, clip, [line.keys[i] for i in picks])
    warnings = reader.read()
    if not clip.times:
        raise MediaError("no frame of the video can be decoded")
    return clip.finish(reader.format, line.rate, len(line.keys), [*line.warnings, *warnings])


class FileReader:
    """Fills ``clip`` with the frames of ``source`` whose keys are ``wanted`` (increasing)."""

    def __init__(self, source: Source, line: Timeline, clip: Clip, wanted: Sequence[int]) -> None:
        self.source = source
        self.line = line
        self.clip = clip
        self.wanted = wanted
        self.format = ""
        self._seconds = dict(zip(line.keys, line.times, strict=True))

    def read(self) -> list[str]:
        """Read as little as gives all frames, or else all of the file; returns what was wrong with it."""
        if self.line.packets is not None:
            damage = self._collect(plan_reading(self.line.packets, self.wanted))
            if len(self.clip.times) == self.clip.planned:
                return self._warnings(damage)
            self.clip.restart()
        return self._warnings(self._collect(None))

    def _collect(self, runs: Sequence[range] | None) -> list[str]:
        """Add frames up to the last one wanted; returns the damage met.

        Where all is read, the next readable frame stands for one that is missing.
        """
        damage: list[str] = []
        wanted = list(self.wanted)
        background = background_color(self.source.options)
        with self.source.open() as container:
            self.format = container.format.name.split(",")[0]
            stream = self.source.stream(container)
            skip = () if runs is None else frozenset(wanted)
            frames = decoded(container, stream, runs, damage, self.clip.work.check, skip)
            for key, frame in timed(frames, self.clip.work.stages, "decode"):
                if key < wanted[0] or (runs is not None and key != wanted[0]):
                    continue
                with self.clip.work.stages.timing("decode"):
                    picture = upright(frame, background)
                self.clip.add(picture, self._seconds.get(key, 0.0), stretch_of(stream, frame))
                wanted = [k for k in wanted if k > key]
                if not wanted:
                    break
        return damage

    def _warnings(self, damage: list[str]) -> list[str]:
        found = []
        if damage:
            found.append(f"{len(damage)} packets could not be decoded ({damage[0]})")
        missing = self.clip.planned - len(self.clip.times)
        if missing and self.clip.times:
            found.append(f"{missing} of {self.clip.planned} frames could not be read")
        return found


def timed(items: Iterator[T], stages: Stages, stage: str) -> Iterator[T]:
    """``items``, the time that each takes to come counted as ``stage``."""
    while True:
        with stages.timing(stage):
            found: Any = next(items, None)
        if found is None:
            return
        yield found
