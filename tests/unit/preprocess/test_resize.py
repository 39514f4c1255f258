import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmserve.core.errors import MediaError
from mmserve.preprocess.resize import MAX_ASPECT, resize, smart_resize, smart_resize_clip

sides = st.integers(1, 5000)


@given(sides, sides, st.sampled_from([28, 32]))
def test_sizes_are_multiples_inside_the_budget(height, width, factor):
    if max(height, width) > MAX_ASPECT * min(height, width):
        with pytest.raises(MediaError):
            smart_resize(height, width, factor=factor, min_pixels=factor**2, max_pixels=10**6)
        return
    h, w = smart_resize(height, width, factor=factor, min_pixels=factor**2 * 4, max_pixels=10**6)
    assert h % factor == w % factor == 0
    assert h > 0
    assert w > 0
    assert h * w <= 10**6 + factor * max(h, w)
    assert h * w >= factor**2 * 4


@given(st.integers(1, 300), sides, sides)
def test_a_whole_clip_stays_inside_its_budget(frames, height, width):
    if max(height, width) > MAX_ASPECT / 4 * min(height, width):
        return
    h, w = smart_resize_clip(
        frames, height, width, factor=32, temporal=2, min_pixels=4096, max_pixels=32 * 32 * 1024
    )
    assert h % 32 == w % 32 == 0
    assert h * w * max(frames, 2) <= 32 * 32 * 1024 or min(h, w) == 32


def test_equal_size_is_equal_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), np.uint8)
    assert (resize(Image.fromarray(pixels), (32, 64)) == pixels).all()
