"""Damaged files end in a picture, a clip or a MediaError, and soon. ``helpers.fuzz`` hunts for longer."""

import random
from zlib import crc32

import pytest
from helpers.fuzz import clips, mutated, pictures, try_clip, try_picture

from mmserve.core.config import MediaOptions
from mmserve.core.messages import VideoPart
from mmserve.preprocess.image import decode_image
from mmserve.preprocess.video import read_video

OPTIONS = MediaOptions(max_image_pixels=1_000_000, max_animation_pixels=10_000_000)


def drawn(name):
    return random.Random(crc32(name.encode()))


@pytest.mark.filterwarnings("ignore")  # Pillow warns about what it finds in damaged files
@pytest.mark.parametrize("name", pictures())
def test_damaged_pictures_raise_nothing_else(name):
    draw = drawn(name)
    for _ in range(150):
        try_picture(mutated(pictures()[name], draw), OPTIONS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", clips())
def test_damaged_clips_raise_nothing_else(name, spec):
    draw = drawn(name)
    for _ in range(60):
        try_clip(mutated(clips()[name], draw), spec, OPTIONS, draw)


def test_the_files_are_whole_before_they_are_damaged(spec):
    for data in pictures().values():
        assert decode_image(data, OPTIONS).pixels.any()
    for data in clips().values():
        assert read_video(VideoPart(data=data, num_frames=2), spec, OPTIONS).pixels
