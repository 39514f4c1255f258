"""Clips made here, frame i of grey ``shade(i)``: what is kept, and when it was."""

import struct
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
from helpers.media_files import (
    clip_file,
    cover_file,
    moving_clip,
    picture_file,
    rotated,
    shade,
    sound_file,
    two_streams,
    with_edit,
    with_matrix,
)
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess import video
from mmserve.preprocess.budget import clip_size
from mmserve.preprocess.sampling import choose_frames, frame_count, frame_indices, nearest_frames
from mmserve.preprocess.timeline import MOST_PACKETS
from mmserve.preprocess.video import read_video


def frames_of(medium):
    """Which frames were kept, by their greys (padding included)."""
    greys = np.concatenate(medium.pixels).mean(axis=(1, 2, 3))
    return [int(np.argmin([abs(g - shade(i)) for i in range(31)])) for g in greys]


@pytest.mark.parametrize(
    ("count", "kept", "times"),
    [
        (1, [0, 0], (0.0,)),
        (2, [0, 1], (0.0, 0.1)),
        (3, [0, 1, 2, 2], (0.0, 0.1, 0.2)),
        (5, [0, 1, 3, 4], (0.0, 0.1, 0.3, 0.4)),
    ],
)
def test_short_clips_are_padded_by_their_last_frame(spec, options, count, kept, times):
    medium = read_video(VideoPart(data=clip_file(count)), spec, options)
    assert frames_of(medium) == kept
    assert medium.seen.timestamps == pytest.approx(times)
    assert len(medium.pixels) == len(medium.digests) == len(medium.timestamps) == len(kept) // 2
    assert all(p.shape[0] == 2 for p in medium.pixels)


def test_a_pairs_time_is_the_mean_of_its_frames(spec, options):
    medium = read_video(VideoPart(data=clip_file(21), num_frames=5), spec, options)
    assert medium.seen.timestamps == pytest.approx((0, 0.5, 1.0, 1.5, 2.0))
    assert medium.timestamps == pytest.approx((0.25, 1.25, 2.0))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_older_families_keep_whole_pairs(qwen2, options, count):
    medium = read_video(VideoPart(data=clip_file(count)), qwen2, options)
    assert frames_of(medium) == {1: [0, 0], 2: [0, 1], 3: [0, 1], 5: [0, 1, 2, 3]}[count]


def test_fps_and_num_frames_of_the_request(spec, options):
    data = clip_file(30)
    assert len(read_video(VideoPart(data=data, fps=4.0), spec, options).seen.timestamps) == 12
    assert frames_of(read_video(VideoPart(data=data, num_frames=2), spec, options)) == [0, 29]
    assert len(read_video(VideoPart(data=data, num_frames=99), spec, options).seen.timestamps) == 30
    few = MediaOptions(max_video_frames=4)
    assert len(read_video(VideoPart(data=data, fps=10.0), spec, few).seen.timestamps) == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fps": 2.0, "num_frames": 4}, "exclude"),
        ({"fps": 0.0}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"num_frames": 0}, "num_frames"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels"),
        ({"max_pixels": 0}, "max_pixels"),
    ],
)
def test_contradictory_options_are_errors(spec, options, fields, said):
    with pytest.raises(MediaError, match=said):
        read_video(VideoPart(data=clip_file(3), **fields), spec, options)


def test_variable_rate_is_sampled_by_time(spec, options):
    times = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 4.0, 8.0]
    medium = read_video(
        VideoPart(data=clip_file(8, times=times, kind="matroska"), num_frames=3), spec, options
    )
    assert frames_of(medium) == [0, 6, 7, 7]
    assert medium.seen.timestamps == pytest.approx((0, 4.0, 8.0))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "libx264"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
        ("mpegts", "libx264"),
        ("asf", "mpeg4"),
        ("h264", "libx264"),
        ("gif", "gif"),
        ("matroska", "libsvtav1"),
        ("mp4", "libx265"),
        ("mpeg", "mpeg2video"),
        ("flv", "flv1"),
        ("webm", "libvpx"),
        ("ogg", "libvpx"),
        ("mov", "mpeg4"),
        ("hevc", "libx265"),
    ],
)
def test_containers_with_and_without_times_and_counts(spec, options, kind, codec):
    rate = 25 if codec == "mpeg2video" else 10
    part = VideoPart(data=clip_file(20, kind=kind, codec=codec, rate=rate), num_frames=4)
    medium = read_video(part, spec, options)
    assert len(medium.seen.timestamps) == 4
    assert frames_of(medium)[:2] == [0, 6]
    clockless = kind in ("h264", "hevc")  # then 25 frames a second are assumed
    step = 6 / (25 if clockless else rate)
    assert medium.seen.timestamps[1] == pytest.approx(step, abs=0.02)


def test_a_truncated_tail_gives_what_is_readable(spec, options):
    data = clip_file(30, kind="mpegts", options={})
    medium = read_video(VideoPart(data=data[: len(data) * 2 // 3], fps=10.0), spec, options)
    assert 4 <= len(medium.seen.timestamps) < 30
    assert frames_of(medium)[: len(medium.seen.timestamps)] == [round(t * 10) for t in medium.seen.timestamps]


def test_a_clip_whose_index_outlives_its_data_warns(spec, options):
    data = clip_file(30, options={"movflags": "faststart"})
    medium = read_video(VideoPart(data=data[: len(data) - 300], fps=10.0), spec, options)
    assert len(medium.seen.timestamps) < 30
    assert medium.seen.warnings


def test_damage_in_the_middle_costs_frames_not_the_clip(spec, options):
    data = bytearray(clip_file(30, options={"movflags": "faststart"}, size=(128, 128)))
    middle = data.index(b"mdat") + 1200
    data[middle : middle + 150] = b"\xff" * 150
    medium = read_video(VideoPart(data=bytes(data), num_frames=8), spec, options)
    assert 1 <= len(medium.seen.timestamps) <= 8


def greys(count, *, size=(64, 96)):
    return [np.full((*size, 3), shade(i), np.uint8) for i in range(count)]


def test_an_edit_list_shows_its_part_from_zero(spec, options):
    """Frames before the edit are decoded, since others lean on them, but are not shown."""
    data = with_edit(moving_clip(greys(30), options={"bf": "2", "g": "50"}), start=1.0, length=1.0)
    medium = read_video(VideoPart(data=data, fps=10.0), spec, options)
    assert frames_of(medium) == list(range(10, 20))
    assert medium.seen.timestamps == pytest.approx([i / 10 for i in range(10)])


def test_times_count_from_the_first_frame_wherever_the_clock_begins(spec, options):
    late = moving_clip(greys(8), kind="matroska", times=[5.0 + i / 10 for i in range(8)])
    early = moving_clip(greys(8), kind="mp4", options={"bf": "3"})  # decoding begins below zero
    for data in (late, early):
        medium = read_video(VideoPart(data=data, fps=10.0), spec, options)
        assert medium.seen.timestamps == pytest.approx([i / 10 for i in range(8)])


def test_a_clip_that_begins_in_mid_group_gives_what_can_be_decoded(spec, options):
    data = moving_clip(greys(30), kind="mpegts", options={"g": "10", "bf": "0"})
    packet = 188
    cut = data[len(data) // 5 // packet * packet :]
    medium = read_video(VideoPart(data=cut, fps=10.0), spec, options)
    kept = frames_of(medium)[: len(medium.seen.timestamps)]
    assert kept[0] % 10 == 0
    assert kept == list(range(kept[0], 30))
    steps = np.diff(medium.seen.timestamps)
    assert steps == pytest.approx(0.1)


def test_open_groups_give_every_frame(spec, options):
    params = "open-gop=1:scenecut=0:keyint=6:bframes=3"
    data = moving_clip(greys(24), kind="mpegts", options={"x264-params": params})
    assert frames_of(read_video(VideoPart(data=data, fps=10.0), spec, options)) == list(range(24))


def test_a_file_that_was_cut_off_says_how_much_is_missing(spec, options):
    data = clip_file(30, options={"movflags": "faststart"})
    medium = read_video(VideoPart(data=data[: len(data) - 300], fps=10.0), spec, options)
    assert "cut off" in medium.seen.warnings[0]
    whole = read_video(VideoPart(data=data, fps=10.0), spec, options)
    assert whole.seen.warnings == ()


def test_an_index_that_promises_millions_of_packets_is_refused(spec, options):
    """A table of equal sizes takes twelve bytes however long it is (ISO 14496-12, stsz, stts, stsc)."""
    data = bytearray(clip_file(3, options={"movflags": "faststart"}))
    many = struct.pack(">I", MOST_PACKETS + 9)
    sizes, times, chunks = (data.index(name) for name in (b"stsz", b"stts", b"stsc"))
    data[sizes + 8 : sizes + 16] = struct.pack(">I", 1) + many
    data[times + 12 : times + 16] = many
    data[chunks + 16 : chunks + 20] = many
    with pytest.raises(MediaError, match="packets"):
        read_video(VideoPart(data=bytes(data)), spec, options)


def test_a_file_without_its_index_says_so(spec, options):
    data = clip_file(30)  # its index stands at the end
    with pytest.raises(MediaError, match="cut off before its index"):
        read_video(VideoPart(data=data[: data.index(b"moov") - 10]), spec, options)


def test_a_cover_picture_alone_is_no_video(spec, options):
    with pytest.raises(MediaError, match=r"no video stream.*cover picture"):
        read_video(VideoPart(data=cover_file()), spec, options)


def test_of_several_streams_the_first_is_shown(spec, options):
    data = two_streams(greys(4), [np.full((64, 64, 3), 255, np.uint8)] * 4)
    medium = read_video(VideoPart(data=data, fps=10.0), spec, options)
    assert medium.seen.source_size == (64, 96)
    assert frames_of(medium) == [0, 1, 2, 3]


def test_frames_of_another_size_in_mid_stream_are_shown_at_the_size_of_the_first(spec, options):
    stream = clip_file(4, kind="h264") + clip_file(4, kind="h264", size=(128, 128))
    medium = read_video(VideoPart(data=stream, num_frames=8), spec, options)
    assert frames_of(medium) == [0, 1, 2, 3] * 2
    assert {p.shape for p in medium.pixels} == {(2, *medium.seen.size, 3)}


def test_audio_only_is_a_clear_error(spec, options):
    with pytest.raises(MediaError, match=r"no video stream.*audio"):
        read_video(VideoPart(data=sound_file()), spec, options)


def test_sound_beside_the_picture_is_ignored(spec, options):
    assert frames_of(read_video(VideoPart(data=clip_file(3, audio=True)), spec, options)) == [0, 1, 2, 2]


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_metadata_is_applied(spec, options, degrees):
    data = rotated(clip_file(2, size=(64, 128)), degrees)
    medium = read_video(VideoPart(data=data), spec, options)
    assert medium.seen.source_size == ((128, 64) if degrees != 180 else (64, 128))


def test_rotation_turns_clockwise(spec, options, tmp_path):
    left_white = np.zeros((64, 64, 3), np.uint8)
    left_white[:, :32] = 255
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height = stream.width = 64
        stream.pix_fmt = "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(left_white, format="rgb24")))
        container.mux(stream.encode())
    medium = read_video(VideoPart(data=rotated(path.read_bytes(), 90)), spec, options)
    frame = medium.pixels[0][0].astype(int)
    assert frame[: len(frame) // 4].mean() > 200 > 50 > frame[-len(frame) // 4 :].mean()


TURNS = {
    (1, 0, 0, 1): lambda p: p,
    (-1, 0, 0, 1): np.fliplr,
    (1, 0, 0, -1): np.flipud,
    (-1, 0, 0, -1): lambda p: np.rot90(p, 2),
    (0, 1, -1, 0): lambda p: np.rot90(p, 3),
    (0, -1, 1, 0): np.rot90,
    (0, 1, 1, 0): lambda p: p.transpose(1, 0, 2),
    (0, -1, -1, 0): lambda p: np.rot90(p, 2).transpose(1, 0, 2),
}


@pytest.mark.parametrize("matrix", TURNS)
def test_every_display_matrix_is_applied_mirrored_ones_too(spec, options, matrix):
    corners = np.zeros((64, 96, 3), np.uint8)
    corners[:16, :16], corners[:16, -16:] = 255, 120
    plain = moving_clip([corners] * 2, options={"crf": "1"})
    medium = read_video(VideoPart(data=with_matrix(plain, *matrix)), spec, options)
    expected = TURNS[matrix](corners)
    assert medium.seen.source_size == expected.shape[:2]
    seen = np.asarray(Image.fromarray(medium.pixels[0][0]).resize(expected.shape[1::-1]))
    assert np.abs(seen.astype(int) - expected).mean() < 4


def one_colour(colour, count=2):
    return [np.full((64, 64, len(colour)), colour, np.uint8)] * count


def first_pixel(medium):
    return medium.pixels[0][0][20, 20].astype(int)


@pytest.mark.parametrize("space", [1, 5, 9])  # BT.709, BT.601, BT.2020
@pytest.mark.parametrize("full", [1, 2])  # limited, full range
def test_the_colours_of_a_clip_follow_its_matrix_and_range(spec, options, space, full):
    data = moving_clip(one_colour((200, 30, 60)), options={"crf": "1"}, colours=(space, full))
    medium = read_video(VideoPart(data=data), spec, options)
    assert np.abs(first_pixel(medium) - (200, 30, 60)).max() <= 4


@pytest.mark.parametrize(
    ("codec", "kind", "form"),
    [
        ("libx264", "mp4", "yuv422p"),
        ("libx264", "mp4", "yuv444p"),
        ("libx264", "mp4", "yuv444p10le"),
        ("libx264", "mp4", "yuvj420p"),
        ("ffv1", "matroska", "bgr0"),
        ("ffv1", "matroska", "gbrp10le"),
        ("ffv1", "matroska", "yuv420p16le"),
        ("prores_ks", "mov", "yuv422p10le"),
        ("qtrle", "mov", "rgb24"),
        ("huffyuv", "avi", "yuv422p"),
    ],
)
def test_odd_pixel_formats_give_their_colours(spec, options, codec, kind, form):
    how = {"crf": "1"} if codec == "libx264" else {}
    data = moving_clip(one_colour((200, 30, 60)), codec=codec, kind=kind, pix_fmt=form, options=how)
    medium = read_video(VideoPart(data=data), spec, options)
    assert np.abs(first_pixel(medium) - (200, 30, 60)).max() <= 6


def test_grey_video_is_grey(spec, options):
    data = moving_clip(one_colour((90, 90, 90)), codec="ffv1", kind="matroska", pix_fmt="gray")
    assert np.ptp(first_pixel(read_video(VideoPart(data=data), spec, options))) == 0


def test_transparent_video_shows_the_background(spec):
    frames = one_colour((200, 30, 60, 0))
    data = moving_clip(frames, codec="qtrle", kind="mov", pix_fmt="argb")
    for name, colour in (("white", (255, 255, 255)), ("#102030", (16, 32, 48))):
        medium = read_video(VideoPart(data=data), spec, MediaOptions(background=name))
        assert first_pixel(medium).tolist() == list(colour)


@pytest.mark.parametrize(("aspect", "wider"), [("2/1", True), ("1/2", False)])
def test_pixels_that_are_not_square_are_shown_stretched(spec, options, aspect, wider):
    data = moving_clip(greys(2, size=(128, 128)), aspect=Fraction(aspect))
    height, width = read_video(VideoPart(data=data), spec, options).seen.size
    assert (width == 2 * height) if wider else (height == 2 * width)


def test_pixels_too_far_from_square_are_not_believed(spec, options):
    data = moving_clip(greys(2, size=(128, 128)), aspect=Fraction(40))
    height, width = read_video(VideoPart(data=data), spec, options).seen.size
    assert height == width


def test_interlaced_frames_stay_woven(spec, options):
    frame = np.zeros((64, 64, 3), np.uint8)
    frame[::2] = 255
    data = moving_clip([frame] * 3, options={"x264-params": "tff=1", "crf": "1"})
    medium = read_video(
        VideoPart(data=data, num_frames=3, min_pixels=64 * 64, max_pixels=64 * 64), spec, options
    )
    assert len(medium.seen.timestamps) == 3
    assert medium.pixels[0][0][::2].mean() > 200 > 50 > medium.pixels[0][0][1::2].mean()


@pytest.mark.parametrize("data", [b"", b"hello", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", bytes(1000)])
def test_what_is_no_clip_is_a_clear_error(spec, options, data):
    with pytest.raises(MediaError):
        read_video(VideoPart(data=data), spec, options)


def test_playlists_that_refer_to_other_files_are_not_followed(spec, options, tmp_path):
    (tmp_path / "clip.ts").write_bytes(clip_file(5, kind="mpegts"))
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{tmp_path}/clip.ts\n#EXT-X-ENDLIST\n"
    concat = f"ffconcat version 1.0\nfile '{tmp_path}/clip.ts'\n"
    for text in (hls, concat):
        with pytest.raises(MediaError, match="not a video"):
            read_video(VideoPart(data=text.encode()), spec, options)


def test_limits(spec):
    data = clip_file(3, size=(64, 96))
    with pytest.raises(MediaError, match="bytes"):
        read_video(VideoPart(data=data), spec, MediaOptions(max_video_bytes=100))
    with pytest.raises(MediaError, match="96x64"):
        read_video(VideoPart(data=data), spec, MediaOptions(max_image_pixels=1000))


def test_frames_that_grow_beyond_the_limit_in_mid_stream_are_left_out(spec):
    stream = clip_file(4, kind="h264") + clip_file(20, kind="h264", size=(480, 640))
    medium = read_video(VideoPart(data=stream), spec, MediaOptions(max_image_pixels=200 * 200))
    assert medium.seen.source_size == (64, 96)
    assert set(frames_of(medium)) <= {0, 1, 2, 3}


@pytest.mark.parametrize("fps", [1e308, 1e-308])
def test_any_positive_rate_gives_frames(spec, options, fps):
    assert read_video(VideoPart(data=clip_file(8), fps=fps), spec, options).pixels


def test_times_beside_a_file_are_refused_since_it_has_its_own(spec, options):
    with pytest.raises(MediaError, match="timestamps"):
        read_video(VideoPart(data=clip_file(2), timestamps=(0.0, 1.0)), spec, options)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "AVIF", "JPEG"])
def test_a_picture_is_a_clip_of_one_frame(spec, options, kind):
    medium = read_video(VideoPart(data=picture_file(Image.new("RGB", (64, 64)), kind)), spec, options)
    assert medium.seen.timestamps == (0.0,)
    assert len(medium.pixels) == 1


# ---------------------------------------------------------------- frames that were cut already


def precut(count):
    return np.stack([np.full((32, 32, 3), shade(i), np.uint8) for i in range(count)])


def test_precut_frames_keep_their_times(spec, options):
    part = VideoPart(frames=precut(3), timestamps=(1.0, 1.5, 4.0))
    medium = read_video(part, spec, options)
    assert frames_of(medium) == [0, 1, 2, 2]
    assert medium.seen.timestamps == (1.0, 1.5, 4.0)


def test_precut_frames_without_times_stand_at_fps(spec, options):
    assert read_video(VideoPart(frames=precut(3), fps=4.0), spec, options).seen.timestamps == (0, 0.25, 0.5)
    assert read_video(VideoPart(frames=precut(3)), spec, options).seen.timestamps == (0, 0.5, 1.0)


def test_precut_frames_can_be_thinned(spec, options):
    assert frames_of(read_video(VideoPart(frames=precut(9), num_frames=2), spec, options)) == [0, 8]
    few = MediaOptions(max_video_frames=4)
    assert len(read_video(VideoPart(frames=precut(9)), spec, few).seen.timestamps) == 4


@pytest.mark.parametrize("times", [(0.0,), (0.0, 1.0, 0.5), (0.0, float("nan"), 1.0)])
def test_precut_times_must_fit(spec, options, times):
    with pytest.raises(MediaError, match="timestamps"):
        read_video(VideoPart(frames=precut(3), timestamps=times), spec, options)


def pictures(count, kind="PNG", size=(32, 32)):
    return tuple(picture_file(np.full((*size, 3), shade(i), np.uint8), kind) for i in range(count))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_encoded_pictures_are_the_frames_of_a_clip(spec, options, kind):
    medium = read_video(VideoPart(pictures=pictures(3, kind), timestamps=(1.0, 1.5, 4.0)), spec, options)
    assert frames_of(medium) == [0, 1, 2, 2]
    assert medium.seen.timestamps == (1.0, 1.5, 4.0)
    assert medium.seen.source_size == (32, 32)


def test_encoded_pictures_equal_the_same_frames_as_arrays(spec, options):
    encoded = read_video(VideoPart(pictures=pictures(5)), spec, options)
    arrays = read_video(VideoPart(frames=precut(5)), spec, options)
    assert encoded.digests == arrays.digests


def test_of_many_pictures_only_those_kept_are_decoded(spec, options):
    some = list(pictures(9))
    some[4] = b"no picture"
    assert frames_of(read_video(VideoPart(pictures=tuple(some), num_frames=2), spec, options)) == [0, 8]


@pytest.mark.parametrize(
    ("some", "said"),
    [
        ((), "no pictures"),
        ((*pictures(2), b"no picture"), "picture 2 of the clip: this is not a picture"),
        ((*pictures(1), *pictures(1, size=(32, 64))), "picture 1 of the clip is 64x32, the first 32x32"),
        ((*pictures(1), b""), "picture 1 of the clip: the picture is empty"),
    ],
)
def test_pictures_that_make_no_clip_are_named_by_their_place(spec, options, some, said):
    with pytest.raises(MediaError, match=said):
        read_video(VideoPart(pictures=some), spec, options)


def test_pictures_of_a_clip_are_bounded_together(spec):
    with pytest.raises(MediaError, match="bytes"):
        read_video(VideoPart(pictures=pictures(4)), spec, MediaOptions(max_video_bytes=200))


# ---------------------------------------------------------------- rules


def test_constant_rate_is_left_as_it_is(spec):
    times = [i / 30 for i in range(500)]
    indices = frame_indices(500, 37, spec)
    assert (nearest_frames(times, indices) == indices).all()
    jittered = [round(t, 3) for t in times]
    assert (nearest_frames(jittered, indices) == indices).all()


def test_any_clip_gives_at_least_one_frame(spec, qwen2):
    for family in (spec, qwen2):
        for total in range(1, 12):
            for asked in ({"fps": 0.001}, {"fps": 1000.0}, {"num_frames": 1}, {"num_frames": 7}, {}):
                given = {"fps": None, "num_frames": None, **asked}
                count = frame_count(total, 25.0, family, most=768, **given)
                picks = frame_indices(total, count, family)
                assert 1 <= count <= total
                assert len(set(picks.tolist())) == count
                assert picks.max() < total


def test_pixel_limits_of_the_request_are_of_one_frame(spec, qwen2):
    for family in (spec, qwen2):
        h, w = clip_size(8, 1000, 1000, family, high=128 * 128)
        assert 96 * 96 <= h * w <= 128 * 128
        h, w = clip_size(8, 40, 40, family, low=200 * 200)
        assert h * w >= 200 * 200


def test_a_long_clip_shares_its_budget(spec, qwen2):
    few, many = clip_size(4, 1000, 1000, spec), clip_size(400, 1000, 1000, spec)
    assert few[0] * few[1] * 4 <= 1 << 20
    assert many[0] * many[1] < few[0] * few[1]
    tokens = [n // 2 * h * w // 28**2 for n in (100, 768) for h, w in [clip_size(n, 1080, 1920, qwen2)]]
    assert max(tokens) <= 128_000 * 0.9


def test_a_clip_that_fits_no_context_is_refused_before_it_is_decoded(qwen2, monkeypatch):
    uncapped = replace(qwen2, frames=replace(qwen2.frames, cap=False))
    monkeypatch.setattr(video, "decoded", lambda *_: pytest.fail("it was decoded"))
    part = VideoPart(data=clip_file(300), fps=10.0, min_pixels=2_000_000)
    with pytest.raises(MediaError, match="vision tokens"):
        read_video(part, uncapped, MediaOptions())


def test_frames_asked_for_by_number_are_all_there_at_a_variable_rate(spec):
    times = [0.0, 0.1, 0.2, 5.0]
    asked = {"fps": None, "num_frames": 4, "most": 768}
    assert choose_frames(times, 0.6, spec, **asked) == [0, 1, 2, 3]
    assert len(choose_frames(times, 0.6, spec, **asked | {"num_frames": 3})) <= 3


def test_the_limits_of_a_request_are_of_one_frame_of_a_clip_of_one_too(spec, options):
    for count in (1, 2, 4):
        part = VideoPart(frames=np.zeros((count, 256, 256, 3), np.uint8), max_pixels=128 * 128)
        assert read_video(part, spec, options).seen.size == (128, 128)
