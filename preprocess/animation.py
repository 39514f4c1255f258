"""GIF, APNG and animated WebP and AVIF sent as clips: Pillow composes their frames."""

from collections.abc import Iterator

from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess.clip import Clip
from mmserve.preprocess.image import background_color, check_size, open_picture, reading
from mmserve.preprocess.media import Medium
from mmserve.preprocess.pixels import to_rgb
from mmserve.preprocess.sampling import frame_count, frame_indices, nearest_frames
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.work import Work

MAGIC = ((0, b"GIF8"), (0, b"\x89PNG\r\n\x1a\n"), (8, b"WEBP"), (4, b"ftypavif"), (4, b"ftypavis"))
SHORTEST_MS = 10  # what says less is shown as long as browsers show it
BROWSERS_MS = 100


def is_animation(data: bytes) -> bool:
    return any(data[at : at + len(magic)] == magic for at, magic in MAGIC)


def read_animation(
    part: VideoPart, data: bytes, spec: ProcessorSpec, options: MediaOptions, work: Work
) -> Medium:
    """The composed frames on the background, each at its own time. A still picture is a clip of one frame.

    Every frame builds on the one before: all up to the last one kept are composed, twice, since the
    durations are found on the way.
    """
    with reading(), open_picture(data) as image:
        _check(image, options)
        warnings: list[str] = []
        with work.stages.timing("demux"):
            times, end = _clock(image, options, work, warnings)
        total = len(times)
        rate = total / end
        count = frame_count(total, rate, spec, part.fps, part.num_frames, options.max_video_frames)
        picks = nearest_frames(times, frame_indices(total, count, spec))
        clip = Clip(part, spec, work, len(picks))
        for i in picks:
            with work.stages.timing("decode"):
                picture = _frame(image, int(i), options)
            clip.add(picture, times[i])
        return clip.finish(str(image.format), rate, total, warnings)


def _check(image: Image.Image, options: MediaOptions) -> None:
    check_size(image.height, image.width, options)
    pixels = image.height * image.width * getattr(image, "n_frames", 1)
    if pixels > options.max_animation_pixels:
        raise MediaError(
            f"the animation has {pixels} pixels in all its frames;"
            f" at most {options.max_animation_pixels} are allowed"
        )


def _clock(
    image: Image.Image, options: MediaOptions, work: Work, warnings: list[str]
) -> tuple[list[float], float]:
    """Seconds at which each readable frame begins, and at which the last one ends."""
    times, now = [], 0.0
    try:
        for duration in _durations(image, options, work):
            times.append(now)
            now += duration
    except (EOFError, OSError, ValueError, SyntaxError) as error:
        if not times:
            raise
        warnings.append(f"only the first {len(times)} frames could be read ({str(error)[:200]})")
    return times, now


def _durations(image: Image.Image, options: MediaOptions, work: Work) -> Iterator[float]:
    """Seconds that each frame is shown, from the first."""
    for i in range(_first(image), getattr(image, "n_frames", 1)):
        work.check()
        image.seek(i)
        image.load()
        check_size(image.height, image.width, options)
        stated = float(image.info.get("duration") or 0)
        yield (stated if stated > SHORTEST_MS else BROWSERS_MS) / 1000


def _frame(image: Image.Image, number: int, options: MediaOptions) -> Image.Image:
    image.seek(_first(image) + number)
    image.load()
    return to_rgb(image, background_color(options))


def _first(image: Image.Image) -> int:
    """An APNG may begin with a picture that is no part of its animation."""
    return int(getattr(image, "default_image", False))
