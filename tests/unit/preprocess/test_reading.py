"""Which packets are decoded: what is planned gives the very frames of a read of the whole."""

import random
from itertools import pairwise

import numpy as np
import pytest
from helpers.media_files import moving_clip, scene
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.config import MediaOptions
from mmserve.core.messages import VideoPart
from mmserve.preprocess import video
from mmserve.preprocess.container import Source
from mmserve.preprocess.decoding import decoded
from mmserve.preprocess.reading import RESTART_PACKETS, Packets, plan_reading
from mmserve.preprocess.timeline import read_timeline
from mmserve.preprocess.video import read_video
from mmserve.preprocess.work import always

# ---------------------------------------------------------------- the plan


def packets(times, keys):
    return Packets(np.array(times), np.isin(np.arange(len(times)), keys))


def test_a_run_goes_from_the_key_packet_to_the_frame():
    table = packets(range(30), keys=[0, 10, 20])
    assert plan_reading(table, [4]) == [range(0, 5)]
    assert plan_reading(table, [20]) == [range(20, 21)]
    assert plan_reading(table, [4, 27]) == [range(0, 5), range(20, 28)]


def test_runs_that_are_near_are_joined():
    table = packets(range(30), keys=[0, 10, 20])
    last = 9 - RESTART_PACKETS
    assert plan_reading(table, [last, 12]) == [range(0, 13)]
    assert plan_reading(table, [last - 1, 12]) == [range(0, last), range(10, 13)]


def test_frames_shown_before_their_key_picture_lean_on_the_group_before():
    table = packets([0, 1, 2, 3, 6, 4, 5, 7], keys=[0, 4])
    assert plan_reading(table, [5]) == [range(0, 7)]
    assert plan_reading(table, [6]) == [range(4, 5)]
    assert plan_reading(table, [7]) == [range(4, 8)]


def test_without_a_key_packet_before_it_reading_begins_at_the_start():
    assert plan_reading(packets(range(9), keys=[5]), [3]) == [range(0, 4)]
    assert plan_reading(packets(range(9), keys=[]), [3, 8]) == [range(0, 9)]


@given(st.integers(1, 60), st.sets(st.integers(0, 59)), st.randoms(use_true_random=False), st.data())
def test_runs_cover_every_wanted_frame_once_and_in_order(count, keys, shuffle, data):
    times = list(range(count))
    for i in range(0, count - 3, 4):
        part = times[i : i + 4]
        shuffle.shuffle(part)
        times[i : i + 4] = part
    wanted = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    runs = plan_reading(packets(times, list(keys)), wanted)
    inside = [i for run in runs for i in run]
    assert inside == sorted(set(inside))
    assert set(wanted) <= {times[i] for i in inside}
    assert all(b.start - a.stop > RESTART_PACKETS for a, b in pairwise(runs))


# ---------------------------------------------------------------- the frames

COUNT = 24


def read(source, runs, wanted):
    with source.open() as container:
        stream = source.stream(container)
        frames = decoded(container, stream, runs, [], always, wanted)
        return {key: frame.to_ndarray(format="rgb24", threads=1) for key, frame in frames}


def assert_planned_equals_whole(data, seed=0):
    source = Source(data, MediaOptions())
    line = read_timeline(source, always)
    whole = read(source, None, ())
    draw = random.Random(seed)
    for count in (1, 1, 2, 3, 6):
        wanted = frozenset(draw.sample(line.keys, min(count, len(line.keys))))
        planned = read(source, plan_reading(line.packets, sorted(wanted)), wanted)
        assert wanted <= set(planned)
        for key in wanted:
            assert (planned[key] == whole[key]).all(), key


@settings(max_examples=15, deadline=None)
@given(
    gop=st.integers(2, 30),
    between=st.integers(0, 4),
    opened=st.booleans(),
    pyramid=st.sampled_from(["none", "normal"]),
    kind=st.sampled_from(["mp4", "matroska", "mpegts"]),
    steps=st.none() | st.lists(st.integers(1, 400), min_size=COUNT, max_size=COUNT),
    seed=st.integers(0, 99),
)
def test_h264_frames_equal_a_read_of_the_whole(gop, between, opened, pyramid, kind, steps, seed):
    params = f"open-gop={opened:d}:b-pyramid={pyramid}:scenecut=0"
    options = {"bf": str(between), "g": str(gop), "preset": "ultrafast", "x264-params": params}
    times = None if steps is None else (np.cumsum(steps) / 1000).tolist()
    clip = moving_clip([scene(i) for i in range(COUNT)], kind=kind, times=times, options=options)
    assert_planned_equals_whole(clip, seed)


@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("mp4", "libx265", {"x265-params": "keyint=8:bframes=3:open-gop=1:log-level=none"}),
        ("mpegts", "libx265", {"x265-params": "keyint=8:bframes=3:open-gop=1:log-level=none"}),
        ("webm", "libvpx", {"g": "8", "auto-alt-ref": "1", "lag-in-frames": "8"}),
        ("webm", "libvpx-vp9", {"g": "8", "auto-alt-ref": "1", "lag-in-frames": "8"}),
        ("mp4", "libsvtav1", {"g": "8", "preset": "12"}),
        ("mp4", "mpeg4", {"g": "8", "bf": "2"}),
        ("mpegts", "mpeg2video", {"g": "8", "bf": "2"}),
        ("avi", "mjpeg", {}),
        ("mp4", "libx264", {"x264-params": "keyint=8:tff=1"}),
    ],
)
def test_frames_of_other_codecs_equal_a_read_of_the_whole(kind, codec, options):
    form = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    frames = [scene(i) for i in range(COUNT)]
    rate = 25 if codec == "mpeg2video" else 10
    data = moving_clip(frames, kind=kind, codec=codec, rate=rate, options=options, pix_fmt=form)
    assert_planned_equals_whole(data)


def test_where_a_jump_gives_no_frame_the_clip_is_read_through(spec, options):
    """A stream that is refreshed column by column has no picture that stands alone but the first."""
    refreshed = {"x264-params": "intra-refresh=1:keyint=8:scenecut=0"}
    data = moving_clip([scene(i) for i in range(COUNT)], options=refreshed)
    medium = read_video(VideoPart(data=data, num_frames=3), spec, options)
    assert len(medium.seen.timestamps) == 3
    assert not medium.seen.warnings


def test_of_a_long_clip_few_packets_are_decoded(spec, options, monkeypatch):
    planned = []
    monkeypatch.setattr(video, "plan_reading", lambda *a: planned.append(plan_reading(*a)) or planned[-1])
    data = moving_clip([scene(i) for i in range(COUNT * 4)], options={"g": "8"})
    medium = read_video(VideoPart(data=data, num_frames=3), spec, options)
    assert len(medium.seen.timestamps) == 3
    assert sum(map(len, planned[0])) <= 3 * 8
