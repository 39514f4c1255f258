"""The decode contract, each row on a file made here."""

import struct
import zlib

import numpy as np
import pytest
from helpers.media_files import (
    ARITHMETIC_JPEG,
    interlaced_png,
    picture_file,
    png_chunk,
    png_file,
    tiff_file,
    without_segment,
)
from PIL import Image, ImageCms, ImageFile
from PIL.PngImagePlugin import PngInfo

from mmserve.core.config import MediaOptions
from mmserve.core.errors import ConfigError, MediaError
from mmserve.preprocess import heif
from mmserve.preprocess.image import background_color, decode_image, from_pixels

RED, BLUE = (255, 0, 0), (0, 0, 255)


def upright():
    """64 x 32, red above blue, a green corner at the top left."""
    image = Image.new("RGB", (64, 32), BLUE)
    image.paste(RED, (0, 0, 64, 16))
    image.paste((0, 255, 0), (0, 0, 16, 8))
    return image


def stored(orientation):
    """How a camera would store ``upright`` with this EXIF orientation."""
    turn = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    return upright().transpose(turn) if turn is not None else upright()


def exif(orientation):
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_orientation_is_undone_exactly(options, orientation, kind):
    how = {"lossless": True} if kind == "WEBP" else {}
    picture = decode_image(picture_file(stored(orientation), kind, exif=exif(orientation), **how), options)
    assert picture.size == (32, 64)
    assert (picture.pixels == np.asarray(upright())).all()


def test_orientation_of_a_jpeg_is_reported(options):
    picture = decode_image(picture_file(stored(6), "JPEG", exif=exif(6), quality=95), options)
    assert (picture.orientation, picture.size, picture.format) == (6, (32, 64), "JPEG")
    assert np.abs(picture.pixels[2, 40].astype(int) - RED).max() < 30


def test_damaged_exif_is_ignored(options):
    assert decode_image(picture_file(upright(), "JPEG", exif=b"Exif\0\0garbage"), options).orientation == 1


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
def test_lossless_formats_give_equal_pixels(options, kind):
    how = {"lossless": True} if kind == "WEBP" else {}
    assert (decode_image(picture_file(upright(), kind, **how), options).pixels == np.asarray(upright())).all()


def test_avif_is_read(options):
    picture = decode_image(picture_file(upright(), "AVIF", quality=100), options)
    assert np.abs(picture.pixels.astype(int) - np.asarray(upright())).mean() < 6


def transparent():
    """Random colours that nobody is meant to see, under alpha 0; opaque red on the right."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8)
    pixels[..., 3] = 0
    pixels[:, 8:] = (*RED, 255)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparency_shows_the_background(kind):
    how = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    data = picture_file(transparent(), kind, **how)
    for name, colour in (("white", (255, 255, 255)), ("#102030", (16, 32, 48))):
        pixels = decode_image(data, MediaOptions(background=name)).pixels
        assert (pixels[:, :8] == colour).all()
        assert (pixels[:, 8:] == RED).all()


def test_transparent_palette_entry_and_colour_key(options):
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, *RED])
    assert (decode_image(picture_file(palette, transparency=1), options).pixels == 255).all()
    assert (
        decode_image(picture_file(Image.new("RGB", (4, 4), RED), transparency=RED), options).pixels == 255
    ).all()


def test_half_transparent_grey_is_blended(options):
    assert (decode_image(picture_file(Image.new("LA", (2, 2), (0, 128))), options).pixels == 127).all()


def test_unknown_background_is_a_configuration_error():
    with pytest.raises(ConfigError, match="background"):
        background_color(MediaOptions(background="no such colour"))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(options, kind):
    ramp = np.array([[0, 257, 32896, 65535]], np.uint16)
    assert decode_image(picture_file(ramp, kind), options).pixels[0, :, 0].tolist() == [0, 1, 128, 255]


def sixteen_bit_rgb():
    row = b"\0" + struct.pack(">6H", 0, 32896, 65535, 65535, 257, 0)
    return png_file(2, 2, 16, 2, row * 2)


def test_sixteen_bit_colour_is_scaled(options):
    assert decode_image(sixteen_bit_rgb(), options).pixels[0].tolist() == [[0, 128, 255], [255, 1, 0]]


@pytest.mark.parametrize("top", [1.0, 255.0, 65535.0])
def test_floats_are_scaled(options, top):
    ramp = np.array([[0, 0.5 * top, top]], np.float32)
    assert decode_image(picture_file(ramp, "TIFF"), options).pixels[0, :, 0].tolist() == [0, 128, 255]


def test_floats_beyond_any_range_use_all_of_it(options):
    ramp = np.array([[-1e6, 0, 1e6, np.nan]], np.float32)
    assert decode_image(picture_file(ramp, "TIFF"), options).pixels[0, :3, 0].tolist() == [0, 128, 255]


def test_one_bit_and_palette(options):
    assert decode_image(picture_file(Image.new("1", (3, 3), 1)), options).pixels.min() == 255
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, *RED])
    assert (decode_image(picture_file(palette), options).pixels == RED).all()


def test_cmyk_and_progressive_jpeg(options):
    cmyk = decode_image(picture_file(upright().convert("CMYK"), "JPEG", quality=95), options)
    progressive = decode_image(picture_file(upright(), "JPEG", quality=95, progressive=True), options)
    assert cmyk.size == progressive.size == (32, 64)
    assert np.abs(progressive.pixels[20, 40].astype(int) - BLUE).max() < 30


def test_cmyk_jpeg_is_read_as_adobe_stores_it_with_its_mark_or_without(options):
    marked = picture_file(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    for data in (marked, without_segment(marked, 0xEE)):
        assert np.abs(decode_image(data, options).pixels[8, 8].astype(int) - RED).max() < 8


def test_arithmetic_jpeg_is_read(options):
    pixels = decode_image(ARITHMETIC_JPEG, options).pixels.astype(int)
    assert np.abs(pixels[3, 3] - RED).max() < 8
    assert np.abs(pixels[13, 3] - BLUE).max() < 8


@pytest.mark.parametrize("size", [(32, 64), (1, 1), (3, 5), (7, 9)])
def test_interlaced_png(options, size):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    assert (decode_image(interlaced_png(pixels), options).pixels == pixels).all()


def test_cmyk_tiff(options):
    data = picture_file(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "TIFF")
    assert (decode_image(data, options).pixels == RED).all()


def test_tiff_of_sixteen_bits_with_white_as_zero_is_inverted(options):
    data = tiff_file(3, 1, 16, 1, struct.pack("<3H", 0, 32896, 65535), photometric=0)
    assert decode_image(data, options).pixels[0, :, 0].tolist() == [255, 127, 0]


def test_tiff_of_sixteen_bit_colour_is_scaled(options):
    data = tiff_file(2, 1, 16, 3, struct.pack("<6H", 0, 32896, 65535, 65535, 257, 0))
    assert decode_image(data, options).pixels[0].tolist() == [[0, 128, 255], [255, 1, 0]]


def test_tiff_of_thirty_two_bits_unsigned_uses_all_of_its_range(options):
    data = tiff_file(3, 1, 32, 1, struct.pack("<3I", 0, 1 << 31, (1 << 32) - 1), photometric=1)
    assert decode_image(data, options).pixels[0, :, 0].tolist() == [0, 128, 255]


def test_tiff_of_float_colour_is_refused_by_name(options):
    with pytest.raises(MediaError, match=r"TIFF.*not supported"):
        decode_image(tiff_file(1, 1, 32, 3, struct.pack("<3f", 0, 0.5, 1), kind=3), options)


def test_first_page_of_many(options):
    pages = [Image.new("L", (4, 4), 9)] * 500
    data = picture_file(Image.new("L", (4, 4), 200), "TIFF", save_all=True, append_images=pages)
    assert (decode_image(data, options).pixels == 200).all()


# ---------------------------------------------------------------- HEIC


@pytest.fixture
def heic():
    heif.load_heif()
    return lambda image, **how: picture_file(image, "HEIF", quality=95, **how)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_heic_is_read_upright(options, heic, orientation):
    picture = decode_image(heic(stored(orientation), exif=exif(orientation)), options)
    assert (picture.size, picture.format, picture.orientation) == ((32, 64), "HEIF", orientation)
    assert np.abs(picture.pixels.astype(int) - np.asarray(upright())).mean() < 4


def test_heic_with_transparency_shows_the_background(options, heic):
    pixels = decode_image(heic(transparent().resize((64, 64), Image.Resampling.NEAREST)), options).pixels
    assert pixels[:, 4:24].min() > 250
    assert np.abs(pixels[:, 40:60].astype(int) - RED).max() < 12


def test_without_the_plug_in_the_error_names_the_extra(options, heic, monkeypatch):
    data = heic(upright())
    heif.load_heif.cache_clear()
    monkeypatch.setattr(heif, "has_heif", lambda: False)
    with pytest.raises(MediaError, match=r"mmserve\[heif\]"):
        decode_image(data, options)


# ---------------------------------------------------------------- the rest


def test_text_chunks_do_not_disturb(options):
    notes = PngInfo()
    notes.add_text("Comment", "x" * 1000)
    assert decode_image(picture_file(upright(), pnginfo=notes), options).size == (32, 64)


def test_colour_profiles_are_converted_to_srgb(options):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = decode_image(picture_file(upright()), options).pixels
    assert (decode_image(picture_file(upright(), icc_profile=srgb), options).pixels == plain).all()
    assert (decode_image(picture_file(upright(), icc_profile=b"garbage" * 40), options).pixels == plain).all()


def swapped_profile():
    """An sRGB profile whose red and blue primaries change places, under another name."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tags = {}
    for i in range(struct.unpack(">I", profile[128:132])[0]):
        name, offset, size = struct.unpack(">4s2I", profile[132 + 12 * i : 144 + 12 * i])
        tags[name] = (offset, size)
    red, blue = tags[b"rXYZ"], tags[b"bXYZ"]
    for (a, n), (b, _) in [(red, blue)]:
        profile[a : a + n], profile[b : b + n] = profile[b : b + n], profile[a : a + n]
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "mine".encode("utf-16-be"))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_another_profile_changes_the_colours(options, mode):
    data = picture_file(upright().convert(mode), icc_profile=swapped_profile())
    pixels = decode_image(data, options).pixels
    assert np.abs(pixels[12, 40].astype(int) - BLUE).max() <= 3
    assert np.abs(pixels[30, 40].astype(int) - RED).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(options, kind):
    how = {"lossless": True} if kind == "WEBP" else {}
    more = [Image.new("RGB", (64, 32), BLUE)]
    data = picture_file(Image.new("RGB", (64, 32), RED), kind, save_all=True, append_images=more, **how)
    assert (decode_image(data, options).pixels == RED).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 28), (500, 19), (400, 2)])
def test_small_and_narrow_pictures_are_read(options, size):
    assert decode_image(picture_file(Image.new("RGB", size)), options).size == size[::-1]


def test_limits_are_checked_before_decoding(options):
    data = png_file(12000, 12000, 8, 2, b"")
    with pytest.raises(MediaError, match="12000x12000"):
        decode_image(data, options)
    with pytest.raises(MediaError, match="bytes"):
        decode_image(data, MediaOptions(max_image_bytes=10))
    with pytest.raises(MediaError, match="too large"):
        decode_image(png_file(14000, 14000, 8, 2, b""), options)


def huge(kind, options):
    """A small file whose header says 60000 x 60000, or the most that the format can say."""
    side = struct.pack(">2I", 60000, 60000)
    if kind in ("AVIF", "HEIF"):
        data = picture_file(Image.new("RGB", (64, 64)), kind)
        at = data.index(b"ispe") + 8
        return data[:at] + side + data[at + 8 :]
    if kind.startswith("WEBP"):
        more = {"save_all": True, "append_images": [Image.new("RGBA", (8, 8), RED)]} if "+" in kind else {}
        small = picture_file(Image.new("RGBA", (8, 8)), "WEBP", lossless=True, **more)
        tail = small[30:] if more else small[12:]
        canvas = bytes([0x12 if more else 0x10, 0, 0, 0]) + (16382).to_bytes(3, "little") * 2
        body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + tail
        return b"RIFF" + struct.pack("<I", len(body)) + body
    return {
        "PNG": png_file(60000, 60000, 8, 2, b""),
        "APNG": png_file(60000, 60000, 8, 2, b"", before=png_chunk(b"acTL", struct.pack(">2I", 9, 0))),
        "GIF": b"GIF89a"
        + struct.pack("<2H3B", 60000, 60000, 0, 0, 0)
        + b",\0\0\0\0`\xea`\xea\0\x08\x01\0\0;",
        "BMP": b"BM"
        + struct.pack("<I2HI", 99, 0, 0, 54)
        + struct.pack("<I2i2H6I", 40, 60000, 60000, 1, 24, *[0] * 6),
        "TIFF": tiff_file(60000, 60000, 8, 3, b"1234"),
        "PPM": b"P6 60000 60000 255\n1234",
        "JPEG": b"\xff\xd8\xff\xc0"
        + struct.pack(">HB2HB", 17, 8, 60000, 60000, 3)
        + b'\1"\0\2\21\1\3\21\1\xff\xda'
        + bytes(50),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["PNG", "APNG", "GIF", "BMP", "TIFF", "PPM", "JPEG", "WEBP", "WEBP+", "AVIF", "HEIF"]
)
def test_headers_that_promise_too_many_pixels_cost_nothing(options, heic, kind):
    data = huge(kind, options)
    with pytest.raises(MediaError):
        decode_image(data, options)
    small = MediaOptions(max_image_pixels=64)
    assert len(data) < 10_000
    with pytest.raises(MediaError):
        decode_image(data, small)


@pytest.mark.parametrize(
    ("name", "head"),
    [(b"zTXt", b"Comment\0\0"), (b"iTXt", b"Comment\0\1\0\0\0"), (b"iCCP", b"profile\0\0")],
)
def test_compressed_chunks_that_grow_are_refused(options, name, head):
    bomb = png_chunk(name, head + zlib.compress(bytes(64 << 20), 9))
    with pytest.raises(MediaError, match="too large"):
        decode_image(png_file(2, 2, 8, 0, b"\0\1\2\0\1\2", before=bomb), options)


def test_more_rows_than_the_header_says_are_not_kept(options):
    assert decode_image(png_file(2, 2, 8, 0, bytes(64 << 20)), options).size == (2, 2)


def test_truncated_pictures_are_never_filled_up(options):
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    data = picture_file(noise, "JPEG")
    with pytest.raises(MediaError, match="truncated"):
        decode_image(data[: len(data) * 3 // 4], options)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"hello", "not a picture"),
        (b"\0\0\1\0" + bytes(60), "icon"),
        (b"\0\0\0\x18ftypheic" + bytes(60), "HEIC.*damaged"),
        (b"\0\0\0\x18ftypavif" + bytes(60), "AVIF.*damaged"),
        (b"\x89PNG\r\n\x1a\n" + bytes(60), "PNG.*damaged"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60), "JPEG 2000"),
        (b"\xff\x0a" + bytes(60), "JPEG XL"),
        (b"\0\0\0\x18ftypmp42" + bytes(60), "send it as a video"),
        (b"%PDF-1.4" + bytes(60), "PDF"),
        (b"  <svg xmlns=''/>", "SVG"),
        (b"<html></html>", "HTML"),
    ],
)
def test_what_is_no_picture_is_named(options, data, said):
    with pytest.raises(MediaError, match=said):
        decode_image(data, options)


def test_icons_are_refused_though_pillow_reads_them(options):
    with pytest.raises(MediaError, match="icon"):
        decode_image(picture_file(Image.new("RGB", (16, 16)), "ICO"), options)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
def test_truncated_or_damaged_files_are_clear_errors(options, kind):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    data = picture_file(noise, kind)
    for cut in (len(data) // 2, 30, 12, 3):
        with pytest.raises(MediaError):
            decode_image(data[:cut], options)


def test_pixels_are_checked(options):
    assert from_pixels(np.zeros((4, 6, 3), np.uint8), options).size == (4, 6)
    for wrong in (np.zeros((4, 6), np.uint8), np.zeros((4, 6, 3)), np.zeros((0, 6, 3), np.uint8)):
        with pytest.raises(MediaError, match="uint8"):
            from_pixels(wrong, options)


def test_a_background_of_the_requests_own_goes_before_the_servers(options):
    hidden = picture_file(np.zeros((4, 4, 4), np.uint8))
    assert (decode_image(hidden, options).pixels == 255).all()
    assert (decode_image(hidden, options, (9, 8, 7)).pixels == [9, 8, 7]).all()
