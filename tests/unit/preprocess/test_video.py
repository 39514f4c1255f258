"""Clips made here, frame i of grey ``shade(i)``: what is kept, and when it was."""

from contextlib import suppress

import av
import numpy as np
import pytest
from helpers.media_files import clip_file, picture_file, rotated, shade, sound_file
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess.budget import clip_size
from mmserve.preprocess.sampling import frame_count, frame_indices, nearest_frames
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
    ],
)
def test_containers_with_and_without_times_and_counts(spec, options, kind, codec):
    part = VideoPart(data=clip_file(20, kind=kind, codec=codec), num_frames=4)
    medium = read_video(part, spec, options)
    assert len(medium.seen.timestamps) == 4
    assert frames_of(medium)[:2] == [0, 6]
    step = 6 / 25 if kind == "h264" else 0.6  # raw H.264 has no clock: 25 frames a second are assumed
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


@pytest.mark.parametrize("kind", ["mp4", "matroska", "mpegts", "avi"])
def test_random_damage_gives_frames_or_a_clear_error(spec, options, kind):
    random = np.random.default_rng(3)
    whole = clip_file(12, kind=kind, codec="mpeg4" if kind == "avi" else "libx264")
    for _ in range(15):
        data = bytearray(whole)
        for at in random.integers(0, len(data), 6):
            data[at] = random.integers(0, 256)
        with suppress(MediaError):
            assert read_video(VideoPart(data=bytes(data)), spec, options).pixels


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
