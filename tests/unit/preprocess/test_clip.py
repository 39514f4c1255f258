"""Where the pixels of a clip live, and what the work of reading it tells."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.media_files import animation_file, clip_file, picture_file, shade
from PIL import Image

from mmserve.core.messages import VideoPart
from mmserve.preprocess.video import read_video
from mmserve.preprocess.work import Cancelled, Work

TESTS = Path(__file__).parents[2]


def gif(count):
    return animation_file([Image.new("L", (64, 64), shade(i)) for i in range(count)], "GIF")


def parts(count):
    frames = [np.full((64, 64, 3), shade(i), np.uint8) for i in range(count)]
    return {
        "file": VideoPart(data=clip_file(count), fps=10.0),
        "animation": VideoPart(data=gif(count), fps=10.0),
        "frames": VideoPart(frames=np.stack(frames)),
        "pictures": VideoPart(pictures=tuple(map(picture_file, frames))),
    }


@pytest.mark.parametrize("source", parts(1))
@pytest.mark.parametrize("count", [1, 4, 5])
def test_all_pixels_are_read_only_views_of_one_allocation(spec, options, source, count):
    given = []

    def allocate(shape):
        given.append(np.empty(shape, np.uint8))
        return given[-1]

    medium = read_video(parts(count)[source], spec, options, Work(allocate=allocate))
    assert len(given) == 1
    assert given[0].shape == (count + count % 2, *medium.seen.size, 3)
    for i, pixels in enumerate(medium.pixels):
        assert pixels.base is not None
        assert np.shares_memory(pixels, given[0][2 * i : 2 * i + 2])
        assert not pixels.flags.writeable


@pytest.mark.parametrize("source", parts(1))
def test_nobody_who_waits_ends_the_work_between_frames(spec, options, source):
    checks = []

    def check():
        checks.append(1)
        if len(checks) == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        read_video(parts(5)[source], spec, options, Work(check=check))


@pytest.mark.parametrize(
    ("source", "stages"),
    [
        ("file", {"demux", "decode", "resize", "digest"}),
        ("animation", {"demux", "decode", "resize", "digest"}),
        ("pictures", {"decode", "resize", "digest"}),
        ("frames", {"resize", "digest"}),
    ],
)
def test_every_stage_is_timed(spec, options, source, stages):
    work = Work()
    read_video(parts(3)[source], spec, options, work)
    assert set(work.stages.seconds) == stages


def test_fewer_frames_than_planned_take_the_leading_part(spec, options):
    data = clip_file(30, options={"movflags": "faststart"})
    given = []

    def allocate(shape):
        given.append(np.empty(shape, np.uint8))
        return given[-1]

    medium = read_video(
        VideoPart(data=data[: len(data) - 300], fps=10.0), spec, options, Work(allocate=allocate)
    )
    assert len(medium.seen.timestamps) < 30
    assert sum(len(p) for p in medium.pixels) < len(given[0])
    assert np.shares_memory(medium.pixels[0], given[0])


MEMORY = """
import resource, sys
from helpers.media_files import clip_file
from mmserve.core.config import MediaOptions
from mmserve.core.messages import VideoPart
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.video import read_video
spec = ProcessorSpec.load(sys.argv[1])
few, many = (VideoPart(data=clip_file(n, size=(128, 192)), fps=10.0, min_pixels=90_000) for n in (8, 768))
read_video(few, spec, MediaOptions())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
medium = read_video(many, spec, MediaOptions())
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, medium.nbytes, len(medium.seen.timestamps))
"""


def test_a_long_clip_takes_its_allocation_and_a_few_frames(qwen2):
    assert resource.RUSAGE_SELF == 0
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(qwen2.folder)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(TESTS)},
    )
    before, after, taken, kept = map(int, done.stdout.split())
    assert kept == 768
    assert taken > 100 << 20
    assert after * 1024 - before * 1024 < taken + (48 << 20)
