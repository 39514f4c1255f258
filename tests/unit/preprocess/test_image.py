"""The decode contract, each row on a file made here."""

import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from helpers.media_files import picture_file
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from mmserve.core.config import MediaOptions
from mmserve.core.errors import ConfigError, MediaError
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


def png(width, height, bits, colour, rows):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = chunk(b"IHDR", struct.pack(">2I5B", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def sixteen_bit_rgb():
    row = b"\0" + struct.pack(">6H", 0, 32896, 65535, 65535, 257, 0)
    return png(2, 2, 16, 2, row * 2)


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
    data = png(12000, 12000, 8, 2, b"")
    with pytest.raises(MediaError, match="12000x12000"):
        decode_image(data, options)
    with pytest.raises(MediaError, match="bytes"):
        decode_image(data, MediaOptions(max_image_bytes=10))
    with pytest.raises(MediaError, match="too large"):
        decode_image(png(14000, 14000, 8, 2, b""), options)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"hello", "not a picture"),
        (b"\0\0\1\0" + bytes(60), "icon"),
        (b"\0\0\0\x18ftypheic" + bytes(60), "not a picture"),
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


def test_random_damage_never_raises_anything_else(options):
    random = np.random.default_rng(2)
    files = [picture_file(upright(), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")]
    for turn in range(300):
        data = bytearray(files[turn % len(files)])
        for at in random.integers(0, len(data), 4):
            data[at] = random.integers(0, 256)
        with suppress(MediaError):
            decode_image(bytes(data), MediaOptions(max_image_pixels=10000))


def test_pixels_are_checked(options):
    assert from_pixels(np.zeros((4, 6, 3), np.uint8), options).size == (4, 6)
    for wrong in (np.zeros((4, 6), np.uint8), np.zeros((4, 6, 3)), np.zeros((0, 6, 3), np.uint8)):
        with pytest.raises(MediaError, match="uint8"):
            from_pixels(wrong, options)


def test_a_background_of_the_requests_own_goes_before_the_servers(options):
    hidden = picture_file(np.zeros((4, 4, 4), np.uint8))
    assert (decode_image(hidden, options).pixels == 255).all()
    assert (decode_image(hidden, options, (9, 8, 7)).pixels == [9, 8, 7]).all()
