"""Thumbnails by which a camera's frames are compared."""

import numpy as np
import pytest
from helpers.media_files import picture_file

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.preprocess.luma import SIDE, TOO_BIG, luma_of_file, luma_of_pixels, thumbnail_size

OPTIONS = MediaOptions()


def half_bright(height=480, width=640):
    """Dark on the left, bright on the right."""
    pixels = np.full((height, width, 3), 40, np.uint8)
    pixels[:, width // 2 :] = 200
    return pixels


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_format_gives_about_the_same(kind):
    luma = luma_of_file(picture_file(half_bright(), kind), OPTIONS)
    assert (luma.dtype, luma.shape) == (np.uint8, (48, SIDE))
    assert np.abs(luma.astype(int) - luma_of_pixels(half_bright())).max() <= 6
    assert abs(int(luma[20, 10]) - 40) <= 3
    assert abs(int(luma[20, 50]) - 200) <= 3


def test_a_jpeg_is_decoded_at_a_part_of_its_size(monkeypatch):
    from PIL import JpegImagePlugin

    sizes, load = [], JpegImagePlugin.JpegImageFile.load

    def noted(image):
        done = load(image)
        sizes.append((image.mode, image.size))
        return done

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", noted)
    luma_of_file(picture_file(half_bright(1080, 1920), "JPEG"), OPTIONS)
    assert sizes[0] == ("L", (240, 135))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_other_modes_are_read(mode):
    from PIL import Image

    kind = "JPEG" if mode in ("L", "CMYK") else "PNG"
    luma = luma_of_file(picture_file(Image.fromarray(half_bright()).convert(mode), kind), OPTIONS)
    assert luma[20, 50] > luma[20, 10] + 50


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (7, 5), (3000, 64), (31, 4000)])
def test_any_shape_has_a_thumbnail(size):
    pixels = np.full((*size, 3), 90, np.uint8)
    for luma in (luma_of_pixels(pixels), luma_of_file(picture_file(pixels), OPTIONS)):
        assert luma.shape == thumbnail_size(*size)
        assert min(luma.shape) >= 4
        assert np.all(luma == 90)


@pytest.mark.parametrize("data", [b"", b"junk", picture_file(half_bright(), "JPEG")[:3000]])
def test_what_cannot_be_read_is_an_error(data):
    with pytest.raises(MediaError) as caught:
        luma_of_file(data, OPTIONS)
    assert caught.value.code != TOO_BIG


def test_what_is_beyond_the_limits_says_so_by_its_code():
    data = picture_file(half_bright())
    for options in (MediaOptions(max_image_bytes=100), MediaOptions(max_image_pixels=1000)):
        with pytest.raises(MediaError) as caught:
            luma_of_file(data, options)
        assert caught.value.code == TOO_BIG


def test_pixels_must_be_rgb():
    with pytest.raises(MediaError, match="uint8"):
        luma_of_pixels(np.zeros((4, 4), np.uint8))
