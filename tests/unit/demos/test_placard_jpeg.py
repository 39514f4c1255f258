"""Pictures that are kept: their pixels as they came, without what the camera wrote beside them."""

import io
from contextlib import suppress

import numpy as np
import pytest
from helpers.placard import jpeg
from PIL import Image, ImageCms, ImageOps

from mmserve.demos.placard.jpeg import cleaned
from mmserve.errors import MediaError

GPS, MAKE = 0x8825, 0x010F


def noisy(size=(40, 24)):
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(image, **options):
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def noted(orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[MAKE] = "A secret camera"
    exif.get_ifd(GPS)[2] = (48.0, 51.0, 24.0)
    return exif


def seen(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_notes_go_and_the_orientation_stays(orientation):
    data = encoded(noisy(), exif=noted(orientation), comment=b"who was there")
    picture = cleaned(data)
    assert b"secret" not in picture.data
    assert b"who was there" not in picture.data
    with Image.open(io.BytesIO(picture.data)) as image:
        exif = image.getexif()
        assert set(exif) <= {0x0112}
        assert exif.get(0x0112, 1) == orientation
    assert np.array_equal(seen(picture.data), seen(data))
    assert picture.size == seen(data).shape[1::-1]


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"quality": 100, "subsampling": 0}, {"restart_marker_blocks": 1}]
)
def test_every_kind_of_scan_keeps_its_pixels(options):
    data = encoded(noisy((97, 61)), **options)
    assert np.array_equal(seen(cleaned(data).data), seen(data))
    assert cleaned(data).size == (97, 61)


def test_colours_stay_as_they_are_meant():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    with Image.open(io.BytesIO(cleaned(encoded(noisy(), icc_profile=profile)).data)) as image:
        assert image.info["icc_profile"] == profile
    cmyk = encoded(noisy().convert("CMYK"))
    assert np.array_equal(seen(cleaned(cmyk).data), seen(cmyk))


def test_what_follows_the_picture_goes():
    assert cleaned(jpeg() + b"<script>" + jpeg("blue")).data == cleaned(jpeg()).data


def test_a_picture_without_notes_stays_byte_for_byte():
    assert cleaned(jpeg()).data == jpeg()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xe0\x00",
        b"\xff\xd8\xff\xe0\x00\x01",
        b"\xff\xd8garbage",
        jpeg()[:-2],
        jpeg()[:200],
    ],
)
def test_what_is_no_whole_jpeg_file_is_refused(data):
    with pytest.raises(MediaError):
        cleaned(data)


def test_any_cut_or_damage_is_refused_or_read_and_nothing_else():
    data = encoded(noisy((16, 16)), exif=noted(6))
    rng = np.random.default_rng(1)
    for _ in range(500):
        broken = bytearray(data[: rng.integers(2, len(data) + 1)])
        for at in rng.integers(2, len(broken), 3) if len(broken) > 2 else ():
            broken[at] = rng.integers(0, 256)
        with suppress(MediaError):
            cleaned(bytes(broken))
