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
from mmserve.preprocess.sampling import choose_frames
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.work import Work

MAGIC = ((0, b"GIF8"), (0, b"\x89PNG\r\n\x1a\n"), (8, b"WEBP"), (4, b"ftypavif"), (4, b"ftypavis"))
SHORTEST_MS = 10  # what says less is shown as long as browsers show it
BROWSERS_MS = 100
MOST_FRAMES = 10_000


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
        with work.stages.timing("demux"):
            times, end, warnings = _clock(image, options, work)
        rate, most = len(times) / end, options.max_video_frames
        picks = choose_frames(times, rate, spec, fps=part.fps, num_frames=part.num_frames, most=most)
        clip = Clip(part, spec, work, len(picks))
        for i in picks:
            with work.stages.timing("decode"):
                picture = _frame(image, i, options)
            clip.add(picture, times[i])
        return clip.finish(str(image.format), rate, len(times), warnings)


def _clock(image: Image.Image, options: MediaOptions, work: Work) -> tuple[list[float], float, list[str]]:
    """Seconds at which each readable frame begins and at which the last one ends; what could not be read."""
    times, now = [], 0.0
    warnings = []
    try:
        for duration in _durations(image, options, work):
            times.append(now)
            now += duration
    except (OSError, ValueError, SyntaxError) as error:
        if not times:
            raise
        warnings.append(f"only the first {len(times)} frames can be read ({str(error)[:200]})")
    return times, now, warnings


def _durations(image: Image.Image, options: MediaOptions, work: Work) -> Iterator[float]:
    """Seconds that each frame is shown, from the first; MediaError as soon as the whole goes over a limit."""
    pixels = 0
    for i in range(_first(image), MOST_FRAMES + 2):
        work.check()
        pixels += image.height * image.width
        _check(image, i, pixels, options)
        try:
            image.seek(i)
        except EOFError:
            return
        image.load()
        stated = float(image.info.get("duration") or 0)
        yield (stated if stated > SHORTEST_MS else BROWSERS_MS) / 1000


def _check(image: Image.Image, number: int, pixels: int, options: MediaOptions) -> None:
    check_size(image.height, image.width, options)
    if pixels > options.max_animation_pixels:
        raise MediaError(
            f"the animation has more than {options.max_animation_pixels} pixels in all its frames,"
            " the most that is allowed"
        )
    if number > MOST_FRAMES:
        raise MediaError(f"the animation has more than {MOST_FRAMES} frames, the most that is allowed")


def _frame(image: Image.Image, number: int, options: MediaOptions) -> Image.Image:
    image.seek(_first(image) + number)
    image.load()
    return to_rgb(image, background_color(options))


def _first(image: Image.Image) -> int:
    """An APNG may begin with a picture that is no part of its animation."""
    return int(getattr(image, "default_image", False))
