"""Cameras that are pulled, each by a process of its own; whatever becomes of one ends that one alone."""

import asyncio
import os
import signal
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from helpers.cameras import FakeLive, RtspCamera, jpeg, moving_clip, until
from helpers.pool_watch import gone

from mmserve.core.config import Config
from mmserve.core.errors import MMServeError, NotFound, Overloaded
from mmserve.live.cameras import Cameras
from mmserve.live.policy import SessionPolicy

QUICK = {"camera_connect_s": 30.0, "camera_idle_s": 2.0, "camera_away_s": 30.0}
POLICY = SessionPolicy(fps=20, heartbeat_s=0.5)


@asynccontextmanager
async def watching(tmp_path, **options):
    given = {
        "pull_cameras": True,
        "allow_private_cameras": True,
        "media_root": str(tmp_path),
        **QUICK,
        **options,
    }
    cameras = Cameras(FakeLive(), Config.of(**given))
    task = asyncio.create_task(cameras.watch())
    try:
        yield cameras
    finally:
        task.cancel()
        await cameras.close()


@pytest.fixture
async def cameras(tmp_path):
    async with watching(tmp_path) as cameras:
        yield cameras


async def pulled(cameras, url, loop=False, owner="me", policy=POLICY):
    camera = await cameras.open("pull", owner, policy, url="shown")
    cameras.pull(camera, url, loop)
    return camera


async def seen(camera, count=5):
    """Whether so many frames have come to the session."""
    return await until(lambda: camera.session.count >= count or camera.state == "ended") and camera.why == ""


def children():
    """Processes of cameras that this one has."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            line = Path(f"/proc/{pid}/cmdline").read_text()
            if int(stat[1]) == os.getpid() and "mmserve.live.sources" in line and stat[0] != "Z":
                found.append(int(pid))
    return found


# ---------------------------------------------------------------- files


async def test_a_file_that_loops_is_a_camera_without_end_at_its_own_pace(cameras, tmp_path):
    clip = moving_clip(tmp_path / "clip.mp4", frames=10, rate=20)
    began = time.monotonic()
    camera = await pulled(cameras, f"file://{clip}", loop=True)
    assert await until(lambda: camera.received >= 40)
    assert time.monotonic() - began > 1.4, "forty frames at twenty a second"
    assert camera.state == "live"
    assert camera.what == "h264 128x96 (mov)"
    frame = camera.session.frames[-1]
    assert frame.pixels.shape == (96, 128, 3)
    assert frame.luma.shape == (48, 64)
    assert frame.captured <= frame.received <= time.monotonic()
    assert [f.seq for f in camera.session.frames] == sorted({f.seq for f in camera.session.frames})


async def test_a_file_that_does_not_loop_ends_at_its_end(cameras, tmp_path):
    clip = moving_clip(tmp_path / "clip.mkv", frames=10, rate=20, kind="matroska")
    camera = await pulled(cameras, f"file://{clip}")
    async with asyncio.timeout(20):
        await camera.ended.wait()
    assert camera.why == "the file is at its end"
    assert camera.session.closed == camera.why
    assert camera.session.count > 0
    assert camera.state == "ended"
    assert await until(lambda: not children())


async def test_a_scene_at_rest_sends_no_pixels(cameras, tmp_path):
    clip = moving_clip(tmp_path / "still.mp4", frames=40, rate=20, moving=False)
    policy = SessionPolicy(fps=20, heartbeat_s=1000, still_s=0.2)
    camera = await pulled(cameras, f"file://{clip}", loop=True, policy=policy)
    assert await until(lambda: camera.session.drops["unchanged"] >= 5)
    count = camera.session.count
    assert await until(lambda: camera.session.drops["unchanged"] >= 20)
    assert camera.session.count == count


async def test_what_is_no_clip_is_tried_again_and_given_up(tmp_path):
    (tmp_path / "junk.mp4").write_bytes(os.urandom(5000))
    async with watching(tmp_path, camera_away_s=1.0) as cameras:
        camera = await pulled(cameras, f"file://{tmp_path}/junk.mp4")
        assert await until(lambda: camera.state == "away")
        assert await until(lambda: camera.state == "ended")
    assert "no frame for" in camera.why


# ---------------------------------------------------------------- RTSP


async def test_a_camera_is_pulled_over_rtsp(cameras):
    with RtspCamera() as source:
        camera = await pulled(cameras, source.url)
        assert await seen(camera, 20)
        assert camera.what == "h264 128x96 (rtsp)"
        assert source.clients == 1
        newest = camera.session.frames[-1]
        assert newest.received - newest.captured < 5


async def test_a_name_and_a_password_are_shown_to_the_camera_that_asks(cameras):
    with RtspCamera(basic="admin:s3cret") as source:
        assert await seen(await pulled(cameras, source.url))


async def test_a_wrong_password_is_not_tried_again(cameras, caplog):
    with RtspCamera(basic="admin:right") as source:
        camera = await pulled(cameras, source.url.replace("right", "wr0ng"))
        assert await until(lambda: camera.state == "ended")
        assert "refuses" in camera.why
        assert source.clients == 1
    shown = camera.why + caplog.text + str(camera.card())
    assert "wr0ng" not in shown
    assert "admin" not in shown


async def test_a_redirect_is_not_followed(cameras):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.5)
        with RtspCamera(redirect=f"rtsp://127.0.0.1:{trap.getsockname()[1]}/x") as source:
            camera = await pulled(cameras, source.url)
            assert await until(lambda: camera.state == "ended")
            assert "redirects" in camera.why
        with pytest.raises(TimeoutError):
            trap.accept()


async def test_a_camera_that_hangs_up_is_connected_to_again(cameras):
    with RtspCamera(hang_up_after=0.5) as source:
        camera = await pulled(cameras, source.url)
        assert await until(lambda: source.clients >= 3)
        assert camera.state in ("live", "away")
        assert camera.session.closed is None


async def test_a_camera_that_falls_silent_is_connected_to_again(cameras):
    with RtspCamera(silent_after=0.5) as source:
        camera = await pulled(cameras, source.url)
        assert await until(lambda: camera.state == "away")
        assert "silent" in camera.why
        assert await until(lambda: source.clients >= 2)


async def test_a_camera_that_is_not_there_is_waited_for_and_then_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with watching(tmp_path, camera_away_s=2.0) as cameras:
        camera = await pulled(cameras, f"rtsp://127.0.0.1:{port}/")
        assert await until(lambda: camera.state == "away")
        assert await until(lambda: camera.state == "ended")
        assert "refuses the connection" in camera.why


# ---------------------------------------------------------------- HTTP


@contextmanager
def web_camera(head, parts, pause=0.05):
    """A server that says ``head`` and then ``parts`` without end; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=talk, args=(client,), daemon=True).start()

    def talk(client):
        with suppress(OSError), client:
            client.recv(65536)
            client.sendall(head)
            i = 0
            while True:
                client.sendall(parts(i))
                i += 1
                time.sleep(pause)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/video"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def mjpeg_part(i):
    data = jpeg(i)
    return b"--x\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data) + data + b"\r\n"


MJPEG = b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace;boundary=x\r\n\r\n"


async def test_a_web_camera_is_pulled_as_mjpeg(cameras):
    with web_camera(MJPEG, mjpeg_part) as url:
        camera = await pulled(cameras, url)
        assert await seen(camera)
        assert camera.what == "mjpeg 128x96 (mpjpeg)"


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "status 403"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/x\r\n\r\n",
            "status|not public|refuses|silent",
        ),
    ],
)
async def test_a_web_camera_that_refuses_is_ended(tmp_path, head, words):
    async with watching(tmp_path, camera_away_s=1.0) as cameras:
        with web_camera(head, lambda i: b"") as url:
            camera = await pulled(cameras, url)
            assert await until(lambda: camera.state == "ended")


async def test_junk_and_floods_cost_nobody_else_anything(cameras, tmp_path):
    clip = moving_clip(tmp_path / "clip.mp4", frames=20, rate=20)
    good = await pulled(cameras, f"file://{clip}", loop=True)
    with (
        web_camera(b"HTTP/1.1 200 OK\r\n\r\n", lambda i: os.urandom(1000)) as junk,
        web_camera(MJPEG, mjpeg_part, pause=0.001) as flood,
        web_camera(MJPEG, lambda i: b"--x\r\nContent-Type: image/jpeg\r\n\r\n" + os.urandom(3000)) as torn,
    ):
        bad = [await pulled(cameras, url) for url in (junk, flood, torn)]
        assert await until(lambda: bad[1].received > 300)
        assert bad[1].session.drops["rate"] > bad[1].session.count, "it is looked at as often as it is of use"
        count = good.session.count
        assert await until(lambda: good.session.count > count + 10)
        assert good.state == "live"


# ---------------------------------------------------------------- processes


async def test_a_process_that_is_killed_is_replaced(cameras, tmp_path):
    clip = moving_clip(tmp_path / "clip.mp4")
    camera = await pulled(cameras, f"file://{clip}", loop=True)
    assert await seen(camera)
    [pid] = children()
    os.kill(pid, signal.SIGKILL)
    assert await until(lambda: camera.state == "away")
    assert "SIGKILL" in camera.why
    count = camera.session.count
    assert await until(lambda: camera.session.count > count and camera.state == "live")
    assert camera.session.closed is None
    assert children() != [pid]


async def test_a_new_policy_reaches_the_process(cameras, tmp_path):
    clip = moving_clip(tmp_path / "clip.mp4")
    slow = SessionPolicy(fps=0.01, heartbeat_s=1000)
    camera = await pulled(cameras, f"file://{clip}", loop=True, policy=slow)
    assert await until(lambda: camera.session.count == 1)
    small = msgspec.structs.replace(POLICY, max_pixels=1024)
    camera.session.update(small)
    assert await until(lambda: camera.session.frames[-1].pixels.size < 3 * 96 * 128)


async def test_who_is_ended_leaves_no_process(cameras, tmp_path):
    clip = moving_clip(tmp_path / "clip.mp4")
    one, other = [await pulled(cameras, f"file://{clip}", loop=True) for _ in range(2)]
    assert await seen(one)
    assert await seen(other)
    pids = children()
    assert len(pids) == 2
    await cameras.end(one, "enough")
    assert len(children()) == 1
    assert one.session.closed == "enough"
    assert other.state == "live"
    await cameras.close()
    assert all(map(gone, pids))


# ---------------------------------------------------------------- the list


async def test_cameras_are_known_to_their_owner_alone(cameras, tmp_path):
    mine = await cameras.open("mjpeg", "me", POLICY, name="porch")
    theirs = await cameras.open("mjpeg", "they", POLICY, name="porch")
    assert cameras.of("me") == [mine]
    assert cameras.get("me", "porch") is mine
    assert cameras.get("they", theirs.id) is theirs
    for key in (theirs.id, "garden"):
        with pytest.raises(NotFound):
            cameras.get("me", key)


async def test_a_name_means_the_newest_that_runs(cameras):
    first, second = [await cameras.open("mjpeg", "me", POLICY, name="porch") for _ in range(2)]
    assert cameras.get("me", "porch") is second
    await cameras.end(second, "enough")
    assert cameras.get("me", "porch") is first
    await cameras.end(first, "enough")
    assert cameras.get("me", "porch") is second


async def test_no_more_than_so_many_at_once(tmp_path):
    async with watching(tmp_path, max_cameras=2) as cameras:
        first, _ = [await cameras.open("mjpeg", "me", POLICY) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 cameras"):
            await cameras.open("mjpeg", "me", POLICY)
        await cameras.end(first, "enough")
        await cameras.open("mjpeg", "me", POLICY)


async def test_a_refusal_of_the_session_leaves_nothing(cameras):
    cameras._live.refusal = Overloaded("the engine is busy")
    with pytest.raises(Overloaded, match="busy"):
        await cameras.open("mjpeg", "me", POLICY)
    assert cameras.of("me") == []


OFFER = "v=0\r\n"


async def offered(cameras):
    """A WebRTC camera, and the answer to its offer that is waited for."""
    camera = await cameras.open("whip", "me", POLICY)
    answer = asyncio.create_task(cameras.answer(camera, OFFER, None))
    for _ in range(2):  # until it is attended to
        await asyncio.sleep(0)
    return camera, answer


async def test_who_waits_for_an_answer_is_told_that_the_camera_has_ended(cameras, monkeypatch):
    monkeypatch.setattr(cameras._spare, "take", asyncio.Event().wait)
    camera, answer = await offered(cameras)
    await cameras.end(camera, "it was deleted")
    async with asyncio.timeout(5):
        with pytest.raises(MMServeError, match="not answered: it was deleted"):
            await answer


async def test_who_waits_for_an_answer_is_told_of_a_fault_at_once(cameras, monkeypatch):
    async def fails():
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(cameras._spare, "take", fails)
    camera, answer = await offered(cameras)
    async with asyncio.timeout(5):
        with pytest.raises(MMServeError, match="its log has the cause"):
            await answer
    assert await until(lambda: camera.session.closed is not None)


async def test_time_and_silence_end_a_camera_that_is_sent(tmp_path):
    async with watching(tmp_path, camera_connect_s=0.5, camera_max_s=0.5) as cameras:
        camera = await cameras.open("mjpeg", "me", POLICY)
        assert await until(lambda: camera.state == "ended")
    async with watching(tmp_path, camera_connect_s=0.5) as cameras:
        camera = await cameras.open("mjpeg", "me", POLICY)
        assert await until(lambda: camera.state == "ended")
        assert "camera_connect_s" in camera.why


async def test_a_server_that_stops_ends_its_cameras(tmp_path):
    stopping = False
    cameras = Cameras(FakeLive(), Config(), lambda: stopping)
    task = asyncio.create_task(cameras.watch())
    camera = await cameras.open("mjpeg", "me", POLICY)
    stopping = True
    assert await until(lambda: camera.state == "ended")
    assert camera.session.closed == "the server is stopping"
    task.cancel()
