"""GIF, APNG and animated WebP and AVIF as clips."""

import numpy as np
import pytest
from helpers.media_files import animation_file, png_chunk, png_file, shade
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess import animation
from mmserve.preprocess.video import read_video

KINDS = ("GIF", "PNG", "WEBP", "AVIF")


def greys(count, size=(48, 48)):
    return [Image.new("RGB", size, (shade(i),) * 3) for i in range(count)]


def frames_of(medium):
    means = np.concatenate(medium.pixels).mean(axis=(1, 2, 3))
    return [int(np.argmin([abs(m - shade(i)) for i in range(31)])) for m in means]


@pytest.mark.parametrize("kind", KINDS)
def test_frames_stand_at_their_own_times(spec, options, kind):
    data = animation_file(greys(5), kind, [100, 200, 100, 400, 100])
    medium = read_video(VideoPart(data=data, num_frames=5), spec, options)
    assert frames_of(medium) == [0, 1, 2, 3, 4, 4]
    assert medium.seen.timestamps == pytest.approx((0, 0.1, 0.3, 0.4, 0.8))
    assert medium.seen.source_size == (48, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_an_animation_is_sampled_by_time(spec, options, kind):
    data = animation_file(greys(7), kind, [100, 100, 100, 100, 100, 3500, 100])
    assert frames_of(read_video(VideoPart(data=data, num_frames=2), spec, options)) == [0, 6]
    assert frames_of(read_video(VideoPart(data=data, num_frames=3), spec, options))[1] in (5, 6)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_transparent_animations_show_the_background(spec, kind):
    """A red square on nothing, then nothing where it was."""
    frames = [Image.new("RGBA", (48, 48), (0, 0, 0, 0)) for _ in range(2)]
    frames[0].paste((255, 0, 0, 255), (0, 0, 24, 48))
    frames[1].paste((0, 0, 255, 255), (24, 0, 48, 48))
    if kind == "WEBP":  # its encoder crops frames to what is opaque and then forgets the transparent canvas
        for frame in frames:
            frame.putpixel((0, 0), (9, 9, 9, 99))
            frame.putpixel((47, 47), (9, 9, 9, 99))
    data = animation_file(frames, kind)
    medium = read_video(VideoPart(data=data), spec, MediaOptions(background="#102030"))
    first, second = medium.pixels[0]
    half = first.shape[1] // 2
    edge = 8
    assert (first[:, edge : half - edge] == (255, 0, 0)).all()
    assert (first[:, half + edge : -edge] == (16, 32, 48)).all()
    assert (second[:, half + edge : -edge] == (0, 0, 255)).all()
    assert (second[:, edge : half - edge] == (16, 32, 48)).all()


def test_durations_that_say_nothing_are_shown_as_browsers_do(spec, options):
    data = animation_file(greys(3), "GIF", 0)
    medium = read_video(VideoPart(data=data, num_frames=3), spec, options)
    assert medium.seen.timestamps == pytest.approx((0, 0.1, 0.2))


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_a_cut_animation_gives_its_readable_frames_and_a_warning(spec, options, kind):
    noise = np.random.default_rng(0).integers(0, 256, (8, 48, 48, 3), np.uint8)
    data = animation_file([Image.fromarray(f) for f in noise], kind)
    medium = read_video(VideoPart(data=data[: len(data) * 3 // 5], fps=10.0), spec, options)
    assert 2 <= len(medium.seen.timestamps) < 8
    assert "first" in medium.seen.warnings[0]


@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_a_cut_animation_that_cannot_be_opened_is_a_clear_error(spec, options, kind):
    data = animation_file(greys(6), kind)
    with pytest.raises(MediaError):
        read_video(VideoPart(data=data[: len(data) // 2]), spec, options)


@pytest.mark.parametrize("kind", KINDS)
def test_all_frames_together_are_bounded(spec, kind):
    data = animation_file(greys(9), kind)
    few = MediaOptions(max_animation_pixels=48 * 48 * 8)
    with pytest.raises(MediaError, match="animation"):
        read_video(VideoPart(data=data), spec, few)
    assert read_video(VideoPart(data=data), spec, MediaOptions(max_animation_pixels=48 * 48 * 10)).pixels


def test_the_number_of_frames_is_bounded(spec, options, monkeypatch):
    monkeypatch.setattr(animation, "MOST_FRAMES", 4)
    with pytest.raises(MediaError, match="more than 4 frames"):
        read_video(VideoPart(data=animation_file(greys(6), "GIF")), spec, options)


def test_a_canvas_that_promises_too_much_is_refused(spec, options):
    data = png_file(12000, 12000, 8, 2, b"", before=png_chunk(b"acTL", bytes([0, 0, 0, 9, 0, 0, 0, 0])))
    with pytest.raises(MediaError, match="12000x12000"):
        read_video(VideoPart(data=data), spec, options)


def test_the_picture_before_an_apng_is_no_part_of_it(spec, options):
    data = animation_file(greys(4), "PNG", default_image=True)
    assert frames_of(read_video(VideoPart(data=data, fps=10.0), spec, options)) == [1, 2, 3, 3]
