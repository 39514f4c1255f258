"""Cameras by WebRTC, uploaded and pulled, over real sockets."""

import asyncio
import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from camera_server import OTHER, camera_server
from helpers.camera_clients import SDP, Upload, client, part, publisher
from helpers.cameras import RtspCamera, jpeg, moving_clip, until
from helpers.pool_watch import children
from helpers.rtsp_server import STREAMS, rtsp_server

from mmserve.server import whip


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with camera_server(tmp_path_factory.mktemp("media")) as running:
        yield running


@pytest.fixture
async def server(running):
    """A server whose cameras have all ended, with no process but one that may wait; it knows no session."""
    service, url = running
    async with client(url) as web:
        for camera in (await web.get("/v1/cameras")).json()["data"]:
            if camera["state"] != "ended":
                await web.delete(f"/v1/cameras/{camera['id']}")
    assert await until(lambda: len(camera_processes()) <= 1)
    service.live.sessions.clear()
    return running


# ---------------------------------------------------------------- WHIP


def camera_processes():
    """The processes of this one's cameras."""

    def is_one(pid):
        with suppress(OSError):
            return b"live.sources.whip" in Path(f"/proc/{pid}/cmdline").read_bytes()

    return {pid for pid in children(os.getpid()) if is_one(pid)}


def of_session(service, number=-1):
    return service.live.sessions[number]


async def test_a_camera_comes_by_whip(server):
    service, url = server
    async with publisher(url) as camera:
        answer = await camera.publish("?name=porch&fps=5&instructions=Say+what+moves.")
        assert answer.status_code == 201, answer.text
        assert answer.headers["content-type"] == "application/sdp"
        assert answer.headers["accept-patch"] == "application/trickle-ice-sdpfrag"
        assert answer.headers["etag"].startswith('"')
        assert answer.headers["location"].startswith("/v1/whip/camera-")
        assert "link" not in answer.headers
        session = of_session(service)
        assert (session.policy.fps, session.instructions) == (5.0, "Say what moves.")
        assert await until(lambda: session.count >= 5)
        frame = session.frames[-1]
        assert frame.pixels.shape == (240, 320, 3)
        assert frame.pixels[100:140].max() > 180, "the square is there"
        told = (await camera.web.get("/v1/cameras/porch")).json()
        assert told["state"] == "live"
        assert told["kind"] == "whip"
        assert told["frames_received"] >= 5
        ended = await camera.web.delete(answer.headers["location"])
        assert ended.status_code == 200
        assert session.closed == "its client has ended it"
        assert (await camera.web.delete(answer.headers["location"])).status_code == 404


async def test_the_answer_is_complete_and_offers_what_is_configured(tmp_path):
    with camera_server(tmp_path, webrtc_ports="47000-47031", webrtc_announce="93.184.216.34") as (_, url):
        async with publisher(url) as camera:
            answer = await camera.publish()
            assert "a=end-of-candidates" in answer.text
            lines = [line.split() for line in answer.text.splitlines() if line.startswith("a=candidate")]
            assert [line[4] for line in lines[:2]] == ["93.184.216.34", "127.0.0.1"]
            assert all(47000 <= int(line[5]) <= 47031 for line in lines)
            assert "c=IN IP4 93.184.216.34" in answer.text


async def test_nobody_without_a_key_has_a_connection_made(server):
    service, url = server
    async with publisher(url, key="wrong") as camera:
        answer = await camera.publish()
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert service.live.sessions == []


async def test_a_camera_belongs_to_its_key(server):
    _, url = server
    async with publisher(url) as camera, client(url, OTHER) as other:
        answer = await camera.publish("?name=porch")
        place = answer.headers["location"]
        assert (await other.get("/v1/cameras")).json()["data"] == []
        assert (await other.delete(place)).status_code == 404
        assert (await other.get("/v1/cameras/porch")).status_code == 404
        told = (await camera.web.get("/v1/cameras")).json()["data"]
        assert [one["id"] for one in told if one["state"] != "ended"] == [place.rpartition("/")[2]]


async def test_audio_is_declined_and_video_taken(server):
    service, url = server
    async with publisher(url, audio=True) as camera:
        answer = await camera.publish()
        audio = answer.text.partition("m=audio")[2].partition("m=")[0]
        assert "a=inactive" in audio
        assert await until(lambda: of_session(service).count >= 3)


@pytest.mark.parametrize(
    ("edit", "status", "code"),
    [
        (lambda sdp: "hello", 400, "invalid_sdp"),
        (lambda sdp: sdp.replace("a=ice-ufrag", "a=ice-nothing"), 400, "invalid_sdp"),
        (lambda sdp: sdp.replace("a=fingerprint:sha-256 ", "a=fingerprint:"), 400, "invalid_sdp"),
        (lambda sdp: sdp.replace("m=video", "m=text"), 422, "unsupported_offer"),
        (lambda sdp: sdp.replace("VP8/", "VP7/").replace("H264/", "H261/"), 422, "unsupported_offer"),
        (lambda sdp: sdp + "a=x\r\n" * 20_000, 400, "invalid_sdp"),
    ],
)
async def test_offers_that_cannot_be_answered(server, edit, status, code):
    service, url = server
    async with publisher(url) as camera:
        answer = await camera.publish(edit=edit)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert await until(lambda: all(session.closed for session in service.live.sessions))


async def test_a_client_that_names_nothing_but_itself_connects(server):
    """Names of mDNS are not looked up, and nobody is believed about private addresses."""
    service, url = server

    def hidden(offer):
        lines = [
            line.replace("127.0.0.1", "abcd-1234.local") if "candidate:" in line else line
            for line in offer.splitlines()
        ]
        return "\r\n".join([*lines, ""])

    async with publisher(url) as camera:
        assert (await camera.publish(edit=hidden)).status_code == 201
        assert await until(lambda: of_session(service).count >= 3)


async def test_more_candidates_may_follow(server):
    _, url = server
    async with publisher(url) as camera:
        answer = await camera.publish()
        place, etag = answer.headers["location"], answer.headers["etag"]
        fragment = "m=video 9 RTP/AVP 0\r\na=mid:0\r\na=candidate:1 1 udp 1 127.0.0.1 50000 typ host\r\n"
        kind = {"content-type": "application/trickle-ice-sdpfrag"}

        async def patch(body=fragment, **headers):
            return (await camera.web.patch(place, content=body, headers={**kind, **headers})).status_code

        assert await patch(**{"if-match": etag}) == 204
        assert await patch() == 428
        assert await patch(**{"if-match": '"other"'}) == 412
        assert await patch("a=ice-ufrag:anew\r\na=ice-pwd:x\r\n" + fragment, **{"if-match": "*"}) == 422
        assert await patch(**{"if-match": etag, "content-type": "text/plain"}) == 415
        assert (await camera.web.get(place)).status_code == 405


async def test_ice_servers_are_told_to_who_has_a_key(tmp_path):
    servers = "stun:stun.example:3478,turn:me:secret@127.0.0.1:9"
    with camera_server(tmp_path, ice_servers=servers) as (_, url):
        async with client(url) as web:
            told = (await web.options("/v1/whip")).headers.get_list("link")
            assert any("stun:stun.example:3478" in link and 'rel="ice-server"' in link for link in told)
            assert any('username="me"' in link and 'credential="secret"' in link for link in told)
        assert httpx.options(f"{url}/v1/whip").status_code == 401


async def test_a_frame_size_may_change_in_mid_stream(server):
    service, url = server
    async with publisher(url) as camera:
        await camera.publish("?fps=20")
        session = of_session(service)
        assert await until(lambda: session.count >= 3)
        camera.track.size = (120, 160)
        assert await until(lambda: session.frames[-1].pixels.shape == (120, 160, 3))


async def test_frames_beyond_the_limit_are_dropped(tmp_path):
    with camera_server(tmp_path, camera_max_pixels=160 * 120) as (service, url):
        async with publisher(url) as camera:
            await camera.publish()
            session = of_session(service)
            assert await until(lambda: session.drops["too_big"] >= 3)
            assert session.count == 0


async def test_who_never_connects_and_who_falls_silent_is_ended(tmp_path):
    with camera_server(tmp_path, camera_connect_s=4.0, camera_idle_s=1.0) as (service, url):
        async with publisher(url) as lonely, publisher(url) as camera:
            answer = await lonely.web.post("/v1/whip", content=await lonely.offer(), headers=SDP)
            assert answer.status_code == 201
            await lonely.connection.close()
            await camera.publish()
            alone, session = service.live.sessions
            assert await until(lambda: session.count >= 3)
            camera.track.pause = 1e9
            camera.track.begun = time.monotonic()
            assert await until(lambda: session.closed is not None)
            assert "camera_idle_s" in session.closed
            assert await until(lambda: alone.closed is not None)
            assert "camera_connect_s" in alone.closed


async def test_the_next_client_finds_a_process_that_waits(server):
    service, url = server
    async with publisher(url) as one, publisher(url) as other:
        await one.publish()
        assert await until(lambda: len(camera_processes()) == 2)
        before = camera_processes()
        await other.publish()
        assert await until(lambda: len(camera_processes()) == 3)
        assert before < camera_processes()
        for number in (0, 1):
            assert await until(lambda number=number: of_session(service, number).count >= 3)


async def test_a_process_that_is_killed_ends_its_own_camera(server):
    service, url = server
    async with publisher(url) as one, publisher(url) as other:
        await one.publish()
        first = camera_processes()
        assert await until(lambda: len(camera_processes()) == 2)
        await other.publish()
        assert await until(lambda: of_session(service).count >= 1)
        os.kill(min(first), signal.SIGKILL)
        doomed, spared = service.live.sessions
        assert await until(lambda: doomed.closed is not None)
        assert "SIGKILL" in doomed.closed
        count = spared.count
        assert await until(lambda: spared.count > count)


async def test_a_client_that_closes_ends_its_camera(server):
    service, url = server
    async with publisher(url) as camera:
        await camera.publish()
        session = of_session(service)
        assert await until(lambda: session.count >= 3)
    assert await until(lambda: session.closed is not None)
    assert session.closed in ("the client has ended its video", "the connection is lost")


async def test_without_aiortc_the_error_names_the_extra(server, monkeypatch):
    _, url = server
    monkeypatch.setattr(whip, "INSTALLED", False)
    async with publisher(url) as camera:
        answer = await camera.publish()
    assert answer.status_code == 501
    assert "mmserve[webrtc]" in answer.json()["error"]["message"]


async def test_the_data_channel_is_a_realtime_conversation(server):
    service, url = server
    async with publisher(url) as camera:
        await camera.publish()
        assert await until(lambda: len(camera.heard) >= 1)
        assert json.loads(camera.heard[0])["type"] == "session.created"
        camera.channel.send(json.dumps({"type": "no.such.event", "event_id": "mine"}))
        assert await until(lambda: any('"mine"' in text for text in camera.heard))
        [error] = [json.loads(text) for text in camera.heard if '"mine"' in text]
        assert error["type"] == "error"
        assert await until(lambda: of_session(service).count >= 3)


# ---------------------------------------------------------------- uploads


async def sending(service, upload, count=3):
    """The session of an upload that has begun to show frames."""
    for i in range(count):
        await asyncio.to_thread(upload.send, part(jpeg(i)))

    def found():
        return [one for one in service.live.sessions if one.policy.window_items == upload.mark]

    assert await until(found)
    [session] = found()
    assert await until(lambda: session.count >= count)
    return session


async def test_a_camera_is_uploaded_as_one_jpeg_after_the_other(server):
    service, url = server
    with Upload(url, "?name=porch&fps=4&window_s=20") as upload:
        session = await sending(service, upload)
        assert (session.policy.fps, session.policy.window_s) == (4.0, 20.0)
        assert [frame.data for frame in session.frames] == [jpeg(i) for i in range(3)]
        async with client(url) as web:
            told = (await web.get("/v1/cameras/porch")).json()
            assert (told["kind"], told["state"], told["session"]["frames"]) == ("mjpeg", "live", 3)
        upload.finish()
        status, body = await asyncio.to_thread(upload.answer)
    assert (status, body["state"], body["frames_received"]) == (200, "ended", 3)
    assert session.closed == "its upload is at its end"


async def test_an_upload_is_larger_than_any_other_body_may_be(tmp_path):
    with camera_server(tmp_path, max_request_bytes=20_000) as (service, url), Upload(url) as upload:
        session = await sending(service, upload)
        for i in range(40):
            await asyncio.to_thread(upload.send, part(jpeg(i)))
        assert await until(lambda: session.count == 43)


async def test_a_picture_cut_anywhere_arrives_whole(server):
    service, url = server
    data = b"".join(part(jpeg(i), length=i % 2) for i in range(6)) + b"--frame--\r\n"
    with Upload(url) as upload:
        for i in range(0, len(data), 97):
            await asyncio.to_thread(upload.send, data[i : i + 97])
        status, body = await asyncio.to_thread(upload.answer)
    assert (status, body["frames_received"]) == (200, 6)
    assert [frame.data for frame in of_session(service).frames] == [jpeg(i) for i in range(6)]


@contextmanager
def beside(service, url):
    """A camera that does well while others do not; it must not notice."""
    with Upload(url, "?name=good") as good:
        good.send(part(jpeg(0)))
        yield good
        number = next(i for i, s in enumerate(service.live.sessions) if s.closed is None)
        session = service.live.sessions[number]
        before = session.count
        good.send(part(jpeg(1)))
        end = time.monotonic() + 20
        while session.count == before and time.monotonic() < end:
            time.sleep(0.01)
        assert session.count == before + 1
        assert session.closed is None


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (os.urandom(70_000), 400),
        (b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: no\r\n\r\n", 400),
    ],
)
async def test_junk_ends_its_own_camera(tmp_path, data, status):
    with camera_server(tmp_path, max_frame_bytes=200_000) as (service, url), beside(service, url):
        assert await until(lambda: service.live.sessions)
        with Upload(url, "?name=bad") as bad:
            with suppress(OSError):
                await asyncio.to_thread(bad.send, data)
            got, body = await asyncio.to_thread(bad.answer)
        assert got == status
        assert "error" in body
        assert await until(lambda: of_session(service).closed is not None)


@pytest.mark.parametrize("length", [True, False])
async def test_a_frame_beyond_the_limit_is_dropped_and_its_camera_goes_on(tmp_path, length):
    with camera_server(tmp_path, max_frame_bytes=200_000) as (service, url), Upload(url) as upload:
        session = await sending(service, upload)
        await asyncio.to_thread(upload.send, part(b"x" * 300_000, length=length) + part(jpeg(3)))
        assert await until(lambda: session.count == 4)
        assert session.drops == {"too_big": 1}
        assert session.frames[-1].seq == 5
        upload.finish()
        status, body = await asyncio.to_thread(upload.answer)
    assert (status, body["frames_received"]) == (200, 5)


async def test_stalls_resets_and_half_open_ones_end_their_own_camera(tmp_path):
    with camera_server(tmp_path, camera_idle_s=2.0) as (service, url):
        async with publisher(url) as good:
            await good.publish()
            with Upload(url, "?name=stalls") as stalls, Upload(url, "?name=half") as half:
                stalled = await sending(service, stalls)
                opened = await sending(service, half, 1)
                half.send(part(jpeg())[:-500])
                resets = Upload(url, "?name=resets")
                reset = await sending(service, resets)
                resets.reset()
                assert await until(lambda: reset.closed == "its upload broke off")
                assert await until(lambda: stalled.closed and opened.closed)
                assert "camera_idle_s" in stalled.closed
                status, body = await asyncio.to_thread(stalls.answer)
                assert (status, body["error"]["code"]) == (409, "camera_ended")
            first = service.live.sessions[0]
            count = first.count
            assert await until(lambda: first.count > count)
            assert first.closed is None


async def test_a_flood_is_taken_and_held_by_nobody(server):
    """A thousand frames at once are read, and each is put over the one before."""
    service, url = server
    with beside(service, url), Upload(url, "?name=flood") as flood:
        session = await sending(service, flood, 1)
        data = b"".join(part(jpeg(i % 12)) for i in range(100))
        for _ in range(10):
            await asyncio.to_thread(flood.send, data)
        assert await until(lambda: session.count == 1001)
        async with client(url) as web:
            assert (await web.get("/v1/cameras/flood")).json()["state"] == "live"


async def test_what_is_no_upload_is_refused(server):
    service, url = server
    async with client(url) as web:
        answer = await web.post("/v1/mjpeg", content=b"x", headers={"content-type": "image/jpeg"})
        assert answer.status_code == 415
        kind = {"content-type": "multipart/x-mixed-replace;boundary=x"}
        for query, field in (
            ("fps=no", "fps"),
            ("fps=0", "fps"),
            ("nonsense=1", "nonsense"),
            ("name=", "name"),
        ):
            answer = await web.post(f"/v1/mjpeg?{query}", content=b"--x--", headers=kind)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert service.live.sessions == []


# ---------------------------------------------------------------- pulled


async def test_a_camera_is_pulled_told_of_without_its_secrets_and_ended(server, caplog):
    service, url = server
    with RtspCamera(basic="admin:s3cret") as source:
        async with client(url) as web:
            body = {
                "url": source.url + "?token=t0ken",
                "name": "gate",
                "policy": {"fps": 5, "heartbeat_s": 1},
            }
            answer = await web.post("/v1/cameras", json=body)
            assert answer.status_code == 201, answer.text
            place = answer.headers["location"]
            assert await until(lambda: of_session(service).count >= 3)
            told = await web.get(place)
            assert (told.json()["state"], told.json()["kind"]) == ("live", "pull")
            assert told.json()["url"] == f"rtsp://***@127.0.0.1:{source.port}/stream?***"
            listed = await web.get("/v1/cameras")
            assert 'mmserve_cameras{kind="pull"} 1.0' in (await web.get("/metrics")).text
            assert (await web.delete("/v1/cameras/gate")).json()["deleted"] is True
            assert of_session(service).closed == "it was deleted"
            assert (await web.get(place)).json()["state"] == "ended"
    shown = answer.text + told.text + listed.text + caplog.text
    assert "s3cret" not in shown
    assert "t0ken" not in shown


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_camera_is_pulled_from_a_server_that_others_have_made(server, kind):
    service, url = server
    with rtsp_server(kind) as source:
        async with client(url) as web:
            answer = await web.post("/v1/cameras", json={"url": source, "policy": {"fps": 5}})
            assert answer.status_code == 201, answer.text
            session = of_session(service)
            assert await until(lambda: session.count >= 5), (await web.get("/v1/cameras")).text
            told = (await web.get(answer.headers["location"])).json()
            assert (told["state"], told["stream"]) == ("live", f"{kind} 320x240 (rtsp)")
            pictures = [frame.pixels for frame in session.frames]
            assert {picture.shape for picture in pictures} == {(240, 320, 3)}
            assert len({picture.argmax() for picture in pictures}) > 1, "the ball moves"
            assert all(picture.max() > 200 and picture.min() < 40 for picture in pictures)
            ages = [frame.received - frame.captured for frame in session.frames]
            assert min(ages) >= 0
            await web.delete(answer.headers["location"])
    assert session.closed == "it was deleted"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": 1}, "url"),
        ({"url": "ftp://x/"}, "url"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"url": "rtsp://127.0.0.1/", "policy": {"fps": 1000}}, "policy.fps"),
        ({"url": "rtsp://127.0.0.1/", "policy": {"nothing": 1}}, "policy.nothing"),
        ({"url": "rtsp://127.0.0.1/", "name": ""}, "name"),
    ],
)
async def test_bodies_that_name_no_camera_are_refused_by_field(server, body, param):
    service, url = server
    async with client(url) as web:
        answer = await web.post("/v1/cameras", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.live.sessions == []


async def test_nothing_is_pulled_unless_it_is_enabled(tmp_path):
    clip = moving_clip(tmp_path / "clip.mp4")
    off = {"pull_cameras": False, "allow_private_cameras": False}
    with camera_server(tmp_path, **off) as (service, url):
        async with client(url) as web:
            answer = await web.post("/v1/cameras", json={"url": f"file://{clip}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "pulling_is_off")
    assert service.live.sessions == []


async def test_private_cameras_are_not_pulled_unless_they_are_allowed(tmp_path):
    with RtspCamera() as source, camera_server(tmp_path, allow_private_cameras=False) as (_, url):
        async with client(url) as web:
            answer = await web.post("/v1/cameras", json={"url": source.url})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_url_forbidden")
        assert source.clients == 0


async def test_a_full_server_says_so(tmp_path):
    clip = moving_clip(tmp_path / "clip.mp4")
    with camera_server(tmp_path, max_cameras=1) as (_, url):
        async with client(url) as web:
            body = {"url": f"file://{clip}", "loop": True}
            assert (await web.post("/v1/cameras", json=body)).status_code == 201
            answer = await web.post("/v1/cameras", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert "retry-after" in answer.headers
