"""Clips and streams on their way to a client."""

import io
import time

import pytest
from helpers.cameras import RtspCamera, moving_clip
from PIL import Image

from mmserve.client.video import Recorder, Source, device
from mmserve.core.errors import MediaError


def recorded(source, stop_after=None, fps=100.0, max_pixels=1 << 20, lost=lambda why: None):
    """What a recorder gives: JPEG files with their times."""
    seen = []

    def put(data, captured):
        seen.append((data, captured))
        if stop_after is not None and len(seen) >= stop_after:
            recorder.stop()

    recorder = Recorder(source, put, fps, max_pixels)
    recorder.run(lost)
    return seen


def test_a_clip_is_shown_at_its_own_pace_as_jpeg_files_of_the_size_wanted(tmp_path):
    path = moving_clip(tmp_path / "clip.mp4", frames=10, rate=20, size=(96, 128))
    began = time.monotonic()
    seen = recorded(Source(name=str(path), clip=True), max_pixels=48 * 64)
    assert time.monotonic() - began >= 9 / 20
    assert 1 <= len(seen) <= 10
    with Image.open(io.BytesIO(seen[0][0])) as picture:
        assert (picture.format, picture.size) == ("JPEG", (64, 48))
    times = [captured for _, captured in seen]
    assert times == sorted(times)


def test_of_many_frames_so_many_a_second_are_given(tmp_path):
    path = moving_clip(tmp_path / "clip.mp4", frames=20, rate=40)
    assert len(recorded(Source(name=str(path), clip=True), fps=4.0)) <= 4


def test_a_loop_goes_on_after_its_end_until_it_is_stopped(tmp_path):
    path = moving_clip(tmp_path / "clip.mp4", frames=3, rate=30)
    assert len(recorded(Source(name=str(path), clip=True, loop=True), stop_after=8)) == 8


def test_a_stream_that_is_lost_is_opened_again():
    told = []
    with RtspCamera(hang_up_after=0.5) as camera:
        # its second visit shows as much again
        source = Source(name=camera.url)
        seen = []

        def put(data, captured):
            seen.append(data)
            if camera.clients >= 2:
                recorder.stop()

        recorder = Recorder(source, put, 100.0, 1 << 20)
        recorder.run(told.append)
    assert camera.clients >= 2
    assert told
    assert seen


@pytest.mark.parametrize("name", ["/nowhere/at/all.mp4", "rtsp://me:secret@127.0.0.1:1/stream?token=secret"])
def test_what_cannot_be_opened_is_said_without_secrets(name):
    with pytest.raises(MediaError) as caught:
        recorded(Source(name=name, clip=name.startswith("/")))
    assert "cannot be read" in caught.value.message
    assert "secret" not in caught.value.message


def test_devices_are_named_as_each_system_does():
    assert (device("0", "linux").name, device("0", "linux").kind) == ("/dev/video0", "v4l2")
    assert device("/dev/v4l/by-id/cam", "linux").name == "/dev/v4l/by-id/cam"
    assert device("1", "darwin").name == "1:none"
    assert device("Integrated Camera", "win32").name == "video=Integrated Camera"
    with pytest.raises(MediaError):
        device("0", "plan9")
