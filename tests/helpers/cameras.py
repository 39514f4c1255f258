"""Cameras to test with: sessions that only take note, moving clips, JPEGs, and a small RTSP server."""

import asyncio
import base64
import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np

from mmserve.live.policy import SessionPolicy


def scene(i, size=(96, 128), moving=True):
    """Frame ``i`` uint8 [H, W, 3]: a bright square on grey, that moves, or does not."""
    height, width = size
    pixels = np.full((height, width, 3), 60, np.uint8)
    side = height // 3
    x = (i * width // 12) % (width - side) if moving else width // 3
    pixels[height // 3 : height // 3 + side, x : x + side] = (220, 40, 40)
    return pixels


def jpeg(i=0, size=(96, 128), moving=True):
    done, data = cv2.imencode(".jpg", scene(i, size, moving)[:, :, ::-1])
    assert done
    return data.tobytes()


def moving_clip(path: Path, frames=20, rate=20, size=(96, 128), moving=True, kind="mp4"):
    """A clip of a moving square at ``path``."""
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream("libx264", rate=rate, options={"tune": "zerolatency"})
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(scene(i, size, moving), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


# ---------------------------------------------------------------- sessions


class FakeSession:
    """Takes note of what a camera gives it."""

    def __init__(self, policy, instructions, owner):
        self.policy, self.instructions, self.owner = policy, instructions, owner
        self.frames, self.drops, self.changed = [], Counter(), []
        self.most_frames = 200
        self.count = 0
        self.closed = None

    def put(self, frame):
        self.count += 1
        self.frames = [*self.frames[-self.most_frames :], frame]

    def drop(self, reason, seq, captured, count=1):
        self.drops[reason] += count

    def update(self, policy):
        self.policy = policy
        for told in self.changed:
            told(policy)

    async def events(self, limit=256):
        await asyncio.Event().wait()
        yield

    def stats(self):
        return {"frames": self.count, **{f"dropped_{reason}": n for reason, n in self.drops.items()}}

    async def close(self, reason="closed"):
        self.closed = reason


class FakeLive:
    """``service.live`` of a server in a test."""

    def __init__(self):
        self.sessions = []
        self.refusal = None

    async def open(self, policy=None, *, instructions=None, owner="", template_kwargs=None):
        if self.refusal is not None:
            raise self.refusal
        self.sessions.append(FakeSession(policy or SessionPolicy(), instructions, owner))
        return self.sessions[-1]


async def until(condition, seconds=20.0):
    """Whether ``condition`` came true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return bool(condition())


# ---------------------------------------------------------------- RTSP

SDP = """v=0
o=- 0 0 IN IP4 127.0.0.1
s=test
t=0 0
m=video 0 RTP/AVP 96
a=rtpmap:96 H264/90000
a=fmtp:96 packetization-mode=1
a=control:track1
""".replace("\n", "\r\n")
MOST_PAYLOAD = 1200


def h264(frames=40, size=(96, 128)):
    """Encoded pictures in Annex B, each a key picture with its headers every ten."""
    encoder = av.CodecContext.create("libx264", "w")
    encoder.height, encoder.width, encoder.pix_fmt = *size, "yuv420p"
    encoder.time_base, encoder.framerate = Fraction(1, 25), Fraction(25)
    encoder.options = {"tune": "zerolatency", "x264-params": "keyint=10:repeat-headers=1:annexb=1"}
    encoded = []
    for i in range(frames):
        frame = av.VideoFrame.from_ndarray(scene(i, size), format="rgb24").reformat(format="yuv420p")
        frame.pts = i
        encoded += [bytes(packet) for packet in encoder.encode(frame)]
    return encoded


def nals(picture):
    """The NAL units of one picture in Annex B."""
    parts = picture.replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1")
    return [part for part in parts if part]


def rtp(pictures, rate=25):
    """RTP packets without end, each with the seconds at which it is due."""
    sequence, start = random.randrange(1 << 15), random.randrange(1 << 20)
    i = 0
    while True:
        units = nals(pictures[i % len(pictures)])
        for n, unit in enumerate(units):
            for payload, last in payloads(unit):
                marker = 0x80 if last and n == len(units) - 1 else 0
                stamp = (start + i * 90000 // rate) & 0xFFFFFFFF
                yield (
                    i / rate,
                    struct.pack(">BBHII", 0x80, marker | 96, sequence & 0xFFFF, stamp, 7) + payload,
                )
                sequence += 1
        i += 1


def payloads(unit):
    """A NAL unit as payloads (RFC 6184), and whether each is its last."""
    if len(unit) <= MOST_PAYLOAD:
        yield unit, True
        return
    head, kind = unit[0] & 0xE0 | 28, unit[0] & 0x1F
    parts = [unit[i : i + MOST_PAYLOAD] for i in range(1, len(unit), MOST_PAYLOAD)]
    for i, part in enumerate(parts):
        flags = (0x80 if i == 0 else 0) | (0x40 if i == len(parts) - 1 else 0)
        yield bytes((head, flags | kind)) + part, i == len(parts) - 1


class RtspCamera:
    """An RTSP server over interleaved TCP, for one client after the other.

    ``basic`` is ``user:password`` where one is asked for; ``redirect`` a URL that every DESCRIBE is sent to;
    ``silent_after`` seconds of video it stays connected and says nothing more; ``hang_up_after`` it closes.
    """

    def __init__(self, *, basic=None, redirect=None, silent_after=None, hang_up_after=None):
        self.basic, self.redirect = basic, redirect
        self.silent_after, self.hang_up_after = silent_after, hang_up_after
        self.pictures = h264()
        self.clients, self.requests = 0, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self):
        return f"rtsp://{self.basic + '@' if self.basic else ''}127.0.0.1:{self.port}/stream"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                self.clients += 1
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client):
        with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as lines:
            while True:
                head = []
                while (line := lines.readline()) not in (b"\r\n", b""):
                    head.append(line.decode().strip())
                if not head:
                    return
                self.requests.append(head[0])
                fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
                if self._answer(client, head[0].split()[0], fields):
                    threading.Thread(target=self._play, args=(client,), daemon=True).start()

    def _answer(self, client, method, fields):
        """Answer one request; whether it begins the video."""
        wanted = self.basic and "Basic " + base64.b64encode(self.basic.encode()).decode()
        status, extra, body = "200 OK", [], ""
        if wanted and method != "OPTIONS" and fields.get("authorization") != wanted:
            status, extra = "401 Unauthorized", ['WWW-Authenticate: Basic realm="camera"']
        elif self.redirect and method == "DESCRIBE":
            status, extra = "302 Found", [f"Location: {self.redirect}"]
        elif method == "OPTIONS":
            extra = ["Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN"]
        elif method == "DESCRIBE":
            extra, body = ["Content-Type: application/sdp"], SDP
        elif method == "SETUP":
            extra = ["Transport: RTP/AVP/TCP;unicast;interleaved=0-1"]
        lines = [f"RTSP/1.0 {status}", f"CSeq: {fields.get('cseq', 0)}", "Session: 1", *extra]
        client.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
        return method == "PLAY" and status == "200 OK"

    def _play(self, client):
        with contextlib.suppress(OSError):
            start = time.monotonic()
            for due, packet in rtp(self.pictures):
                if self.silent_after is not None and due > self.silent_after:
                    return
                if self.hang_up_after is not None and due > self.hang_up_after:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                time.sleep(max(0.0, start + due - time.monotonic()))
                client.sendall(struct.pack(">cBH", b"$", 0, len(packet)) + packet)
