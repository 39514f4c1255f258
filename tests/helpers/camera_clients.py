"""Clients that send a server their camera: by WHIP with aiortc, and as an upload by a bare socket."""

import asyncio
import itertools
import json
import socket
import struct
import time
from contextlib import asynccontextmanager, suppress
from fractions import Fraction
from unittest import mock

import aioice.ice
import av
import httpx
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription, VideoStreamTrack
from helpers.cameras import scene

KEY = "k" * 20
SDP = {"content-type": "application/sdp"}


def client(url, key=KEY):
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)


class Square(VideoStreamTrack):
    """A square that moves; ``size`` may be changed at any time."""

    def __init__(self, size=(240, 320), fps=20):
        super().__init__()
        self.size, self.count, self.pause, self.begun = size, 0, 1 / fps, time.monotonic()

    async def recv(self):
        self.count += 1
        await asyncio.sleep(max(0.0, self.begun + self.count * self.pause - time.monotonic()))
        frame = av.VideoFrame.from_ndarray(scene(self.count // 2, self.size), format="rgb24")
        frame = frame.reformat(format="yuv420p")
        frame.pts, frame.time_base = int(self.count * self.pause * 90000), Fraction(1, 90000)
        return frame


class Publisher:
    """A WHIP client; made by ``publisher``."""

    def __init__(self, web, track=None, audio=False):
        self.web = web
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.track = track or Square()
        self.connection.addTransceiver(self.track, "sendonly")
        if audio:
            self.connection.addTransceiver("audio", "sendrecv")
        self.channel = self.connection.createDataChannel("events")
        self.heard = []
        self.channel.on("message", self.heard.append)
        self.answer = None

    async def offer(self):
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return self.connection.localDescription.sdp

    async def publish(self, query="", edit=lambda offer: offer):
        offer = edit(await self.offer())
        self.answer = await self.web.post(f"/v1/whip{query}", content=offer, headers=SDP)
        if self.answer.status_code == 201:
            sdp = self.answer.text
            await self.connection.setRemoteDescription(RTCSessionDescription(sdp, "answer"))
        return self.answer


@asynccontextmanager
async def publisher(url, key=KEY, **given):
    """A WHIP client; its addresses are loopback, which aiortc's own clients never gather."""
    with mock.patch.object(aioice.ice, "get_host_addresses", return_value=["127.0.0.1"]):
        async with client(url, key) as web:
            made = Publisher(web, **given)
            try:
                yield made
            finally:
                await made.connection.close()


def part(data, length=True):
    size = b"Content-Length: %d\r\n" % len(data) if length else b""
    return b"--frame\r\nContent-Type: image/jpeg\r\n" + size + b"\r\n" + data + b"\r\n"


MARKS = itertools.count(100)


class Upload:
    """A camera that uploads by a bare socket."""

    def __init__(self, url, query="?name=porch", key=KEY, boundary="frame"):
        host, port = url.removeprefix("http://").split(":")
        self.mark = next(MARKS)  # by which its session is known
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        lines = [
            f"POST /v1/mjpeg{query}&window_items={self.mark} HTTP/1.1",
            *("Host: x", f"Authorization: Bearer {key}", "Transfer-Encoding: chunked", "Connection: close"),
            f"Content-Type: multipart/x-mixed-replace;boundary={boundary}",
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(b"%x\r\n" % len(data) + data + b"\r\n")

    def finish(self):
        self.socket.sendall(b"0\r\n\r\n")

    def reset(self):
        """Close with an RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def answer(self):
        """(status, body) of the server's answer."""
        data = b""
        with suppress(ConnectionResetError):
            while more := self.socket.recv(65536):
                data += more
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)
