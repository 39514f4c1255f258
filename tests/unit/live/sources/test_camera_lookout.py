"""Which frames of a camera leave its process."""

import io
import socket
import threading
import time
from itertools import pairwise

import av
import numpy as np
import pytest
from av.video.reformatter import Colorspace
from helpers.cameras import scene
from helpers.media_files import rotated
from PIL import Image

from mmserve.core.config import CameraOptions, MediaOptions
from mmserve.core.wire import receive, receive_exactly
from mmserve.live.policy import SessionPolicy
from mmserve.live.sources.lookout import Lookout, Sluice, luma_of
from mmserve.live.sources.messages import Picture, Tally, from_camera
from mmserve.live.sources.post import Post, Shown

REST = scene(0, moving=False)


def clip_of(pixels):
    """An mp4 of one frame, marked as BT.709."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "5", "colorspace": "bt709"})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], "yuv444p"
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame = frame.reformat(format="yuv444p", dst_colorspace=Colorspace.ITU709)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def frame_of(pixels, pixel_format="yuv420p"):
    return av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pixel_format)


def passed(sluice, pictures, rate=10.0, start=100.0):
    """Numbers of the frames that pass, of those that are worth a look."""
    found = []
    for i, pixels in enumerate(pictures):
        at = start + i / rate
        if sluice.due(at) and sluice.passes(luma_of(frame_of(pixels)), at):
            found.append(i)
    return found


# ---------------------------------------------------------------- the sluice


def test_what_moves_passes_at_twice_the_rate_of_the_policy_at_least():
    found = passed(Sluice(SessionPolicy(fps=2)), [scene(i) for i in range(50)])
    assert len(found) >= 16
    assert all(b - a <= 3 for a, b in pairwise(found))


def test_a_scene_at_rest_passes_no_more_but_for_a_frame_now_and_then():
    policy = SessionPolicy(fps=2, heartbeat_s=20, still_s=1)
    found = passed(Sluice(policy), [REST] * 600)
    assert found[0] == 0
    first, later = [i for i in found if i <= 25], [i for i in found if i > 25]
    assert len(first) >= 4, "time for a session to see that it is still"
    assert 8 <= len(later) <= 13, "every five seconds"


def test_a_change_passes_at_once_and_so_do_the_frames_after_it():
    pictures = [REST] * 100 + [scene(6)] * 100
    found = [i for i in passed(Sluice(SessionPolicy(fps=2, heartbeat_s=1000)), pictures) if i > 50]
    assert 100 <= found[0] <= 102
    assert len(found) >= 4
    assert found[-1] < 130


def test_noise_is_no_change():
    draw = np.random.default_rng(0)
    pictures = [np.clip(REST + draw.normal(0, 6, REST.shape), 0, 255).astype(np.uint8) for _ in range(200)]
    found = passed(Sluice(SessionPolicy(fps=2, heartbeat_s=1000)), pictures)
    assert max(found) < 30


def test_times_that_jump_back_begin_anew():
    sluice = Sluice(SessionPolicy())
    assert passed(sluice, [REST], start=1000.0) == [0]
    assert sluice.due(5.0)


@pytest.mark.parametrize(
    "pixel_format", ["yuv420p", "yuvj420p", "nv12", "yuv444p", "gray", "rgb24", "yuv420p10le"]
)
def test_the_thumbnail_of_any_pixel_format_shows_the_same(pixel_format):
    luma = luma_of(frame_of(REST, pixel_format)).astype(int)
    assert luma.shape == (48, 64)
    assert np.abs(luma - luma_of(frame_of(REST))).max() < 25


def test_lines_that_are_longer_than_the_picture_are_cut():
    """FFmpeg pads lines for its own use."""
    pixels = np.zeros((50, 70, 3), np.uint8)
    pixels[:, 35:] = 255
    luma = luma_of(frame_of(pixels))
    assert luma[:, :20].max() < 40
    assert luma[:, -20:].min() > 200


# ---------------------------------------------------------------- the post


class Api:
    """The other end of a camera's socket, which reads when it is told to."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(10)
        self.left = []
        self.post = Post(theirs, self.left.append)

    def read(self):
        message = from_camera(receive(self.socket))
        if isinstance(message, Picture):
            pixels = np.frombuffer(receive_exactly(self.socket, message.nbytes), np.uint8)
            return message, pixels.reshape(message.height, message.width, 3)
        return message, None

    def read_until(self, kind):
        while True:
            message, pixels = self.read()
            if isinstance(message, kind):
                return message, pixels


@pytest.fixture
def api():
    api = Api()
    yield api
    api.socket.close()


def lookout(api, policy=None, **options):
    return Lookout(policy or SessionPolicy(), CameraOptions(**options), MediaOptions(), api.post)


def test_a_frame_arrives_with_its_colours_times_and_thumbnail(api):
    now = time.monotonic()
    lookout(api).see(frame_of(REST, "yuv444p"), now - 0.5, now)
    picture, pixels = api.read_until(Picture)
    assert (picture.seq, picture.captured, picture.received) == (1, now - 0.5, now)
    assert np.abs(pixels.astype(int) - REST).mean() < 4
    assert picture.luma.shape == (48, 64)


def test_frames_are_made_no_larger_than_they_are_of_use(api):
    big = np.zeros((1080, 1920, 3), np.uint8)
    now = time.monotonic()
    lookout(api, SessionPolicy(max_pixels=64 * 64)).see(frame_of(big), now, now)
    _, pixels = api.read_until(Picture)
    assert 64 * 64 <= pixels.shape[0] * pixels.shape[1] <= 2 * 64 * 64
    assert pixels.shape[1] / pixels.shape[0] == pytest.approx(16 / 9, rel=0.05)


def test_large_frames_keep_their_colours_and_are_turned_upright(api):
    data = rotated(clip_of(np.kron(REST, np.ones((10, 10, 1), np.uint8))), 90)
    with av.open(io.BytesIO(data)) as container:
        frame = next(container.decode(video=0))
    now = time.monotonic()
    lookout(api).see(frame, now, now)
    _, pixels = api.read_until(Picture)
    height, width, _ = pixels.shape
    assert height > width
    assert height * width < 2 << 18
    wanted = np.asarray(Image.fromarray(np.rot90(REST, -1)).resize((width, height), Image.Resampling.BOX))
    assert np.abs(pixels.astype(int) - wanted).mean() < 6


def test_frames_that_are_dropped_are_counted_by_reason(api):
    looks = lookout(
        api, SessionPolicy(max_frame_age_ms=1000), camera_max_pixels=REST.shape[0] * REST.shape[1]
    )
    now = time.monotonic()
    looks.see(frame_of(REST), now - 5, now)
    looks.see(frame_of(np.zeros((128, 128, 3), np.uint8)), now, now)
    looks.see(frame_of(REST), now, now)
    looks.see(frame_of(REST), now + 0.01, now)
    looks.lose()
    received, dropped = 0, {}
    while received < 5:
        tally, _ = api.read_until(Tally)
        received += tally.received
        dropped |= {reason: drop.count for reason, drop in tally.dropped.items()}
    assert dropped == {"late": 1, "too_big": 1, "rate": 1, "decode_error": 1}


def test_while_the_api_does_not_read_the_newest_frame_alone_waits(api):
    """Nothing blocks whoever decodes, and no more than one frame is held."""
    made = []

    def rgb(i):
        made.append(i)
        return np.full((512, 512, 3), i, np.uint8)

    superseded = 0
    for i in range(1, 51):
        shown = Shown(i, 0.0, 0.0, np.zeros((4, 4), np.uint8), lambda i=i: rgb(i))
        superseded += api.post.show(shown) is not None
        time.sleep(0.002)
    assert superseded >= 45
    assert len(made) <= 5
    seen = [api.read()[0].seq for _ in range(50 - superseded)]
    assert seen == sorted(seen)
    assert seen[-1] == 50


def test_words_are_not_lost_behind_frames(api):
    api.post.show(Shown(1, 0.0, 0.0, np.zeros((4, 4), np.uint8), lambda: np.zeros((1024, 1024, 3), np.uint8)))
    for i in range(20):
        api.post.say(Tally(i, {}))
    told = [api.read()[0] for _ in range(21)]
    assert [tally.received for tally in told if isinstance(tally, Tally)] == list(range(20))
    flushed = threading.Event()
    threading.Thread(target=lambda: (api.post.flush(10), flushed.set()), daemon=True).start()
    assert flushed.wait(10)
