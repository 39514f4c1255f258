"""The process of a camera that comes by WebRTC: one peer connection of aiortc, from its offer to its end.

It is started before there is an offer, since aiortc takes its time to load.

    python -m mmserve.live.sources.whip SOCKET_FD LINE_FD PARENT_PID ""

aiortc decodes on a thread of its own, between two queues without bounds. The one behind the decoder is always
drained (``_pump``); one that grows before it ends the session (``_mind``).
"""

import asyncio
import ipaddress
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aioice.ice
from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.exceptions import OperationError
from aiortc.mediastreams import MediaStreamError
from aiortc.sdp import candidate_from_sdp

from mmserve.core.config import CameraOptions, listed, port_range
from mmserve.core.errors import InvalidRequest, MediaError, MMServeError
from mmserve.core.wire import Fault
from mmserve.live.sources import sdp
from mmserve.live.sources.clock import SourceClock
from mmserve.live.sources.lookout import Lookout
from mmserve.live.sources.messages import (
    Answered,
    Ended,
    Heard,
    Live,
    Offer,
    Opened,
    Say,
    ToCamera,
    Trickle,
    Watch,
    WhipHello,
)
from mmserve.live.sources.own import begin
from mmserve.live.sources.post import Post

MOST_CHANNEL_CHARS = 1 << 18  # of one message over the data channel
MOST_UNREAD = 4 << 20  # bytes of messages that the client does not take
MOST_UNDECODED = 300  # frames that wait for the decoder
MIND_S = 0.5
LAST_WORDS_S = 1.0


class PortLoop(asyncio.SelectorEventLoop):
    """An event loop whose UDP sockets take their ports from ``ports``, or any if that is None."""

    def __init__(self, ports: range | None) -> None:
        super().__init__()
        self._udp_ports = ports
        self.beat = time.monotonic()  # when it had a turn last

    async def create_datagram_endpoint(self, *args: Any, **given: Any) -> Any:
        host, port = given.get("local_addr") or (None, None)
        if self._udp_ports is None or port != 0:
            return await super().create_datagram_endpoint(*args, **given)
        fault = OSError("there is no port")
        for port in random.sample(self._udp_ports, len(self._udp_ports)):
            try:
                return await super().create_datagram_endpoint(*args, **{**given, "local_addr": (host, port)})
            except OSError as error:
                fault = error
        raise fault


class Peer:
    """One client."""

    def __init__(self, offer: Offer, hello: WhipHello, post: Post) -> None:
        self._offer = offer
        self._options: CameraOptions = hello.cameras
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._lookout = Lookout(offer.policy, hello.cameras, hello.media, post)
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._channel: Any = None
        self._trickled = 0
        self._jobs: set[asyncio.Task[None]] = set()
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=ice_servers(self._options)))
        self._connection.on("track", self._on_track)
        self._connection.on("datachannel", self._on_channel)
        self._connection.on("connectionstatechange", self._on_state)

    async def run(self) -> Ended:
        """Answer, and watch until the client has gone. InvalidRequest if the offer cannot be answered."""
        self._post.say(Answered(await self._answer()))
        why = await self._ended
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._connection.close()
        return Ended(why)

    # ------------------------------------------------------------ offer and answer

    async def _answer(self) -> str:
        offer = sdp.guarded(self._offer.sdp, self._options.webrtc_private)
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        except OperationError:
            raise sdp.Unprocessable("none of the offered codecs is known here: VP8 and H.264 are") from None
        except Exception:  # aiortc's parser checks little, and falls over what it does not expect
            raise InvalidRequest("the SDP offer cannot be read", code=sdp.UNREADABLE) from None
        self._choose()
        await self._connection.setLocalDescription(await self._connection.createAnswer())
        answer = self._connection.localDescription.sdp
        if sdp.CANDIDATE not in answer:
            raise MMServeError("there is no address or port at which WebRTC could be offered (webrtc_ports)")
        return sdp.arranged(answer, self._first(), self._options.webrtc_announce)

    def _first(self) -> list[str]:
        """Where clients go first: as configured, or where this one came in if that is no proxy here."""
        hosts, reached = list(listed(self._options.webrtc_hosts)), self._offer.reached
        if not hosts and reached and not ipaddress.ip_address(reached).is_loopback:
            hosts.append(reached)
        return hosts

    def _choose(self) -> None:
        """The first video that is sent is taken; no audio, and no second camera."""
        chosen = False
        for transceiver in self._connection.getTransceivers():
            if transceiver.kind == "video" and not chosen:
                chosen = True
            else:
                transceiver.direction = "inactive"

    # ------------------------------------------------------------ what comes

    def _on_track(self, track: Any) -> None:
        videos = [t.receiver for t in self._connection.getTransceivers() if t.kind == "video"]
        if videos and videos[0].track is track:
            self._spawn(self._pump(track))
            self._spawn(self._mind(videos[0]))

    async def _pump(self, track: Any) -> None:
        """Take every frame as soon as it is decoded."""
        clock = SourceClock()
        with suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                received = time.monotonic()
                self._lookout.see(frame, clock.captured(frame.time, received), received)
        self._end("the client has ended its video")

    async def _mind(self, receiver: Any) -> None:
        """End the session when more comes than can be decoded: the queue before the decoder has no end."""
        queue = getattr(receiver, "_RTCRtpReceiver__decoder_queue", None)
        while queue is not None and queue.qsize() < MOST_UNDECODED:
            await asyncio.sleep(MIND_S)
        self._end("it sends more than can be decoded")

    def _on_channel(self, channel: Any) -> None:
        if self._channel is not None:
            return channel.close()
        self._channel = channel
        channel.on("message", self._on_message)
        self._post.say(Opened())

    def _on_message(self, text: Any) -> None:
        if isinstance(text, str) and len(text) <= MOST_CHANNEL_CHARS:
            self._post.say(Heard(text))
        else:
            self._end(f"data channels are for text of at most {MOST_CHANNEL_CHARS} characters")

    def _on_state(self) -> None:
        match self._connection.connectionState:
            case "connected":
                self._post.say(Live("WebRTC"))
            case "failed" | "closed":
                self._end("the connection is lost")

    # ------------------------------------------------------------ what the api says

    def take(self, message: ToCamera) -> None:
        match message:
            case Watch(policy=policy):
                self._lookout.watch(policy)
            case Say(text=text):
                self._say(text)
            case Trickle(candidates=candidates):
                self._spawn(self._add(candidates))

    def _say(self, text: str) -> None:
        if self._channel is None or self._channel.readyState != "open":
            return
        if self._channel.bufferedAmount > MOST_UNREAD:
            return self._end("the client does not read its data channel")
        self._channel.send(text)

    async def _add(self, candidates: Sequence[str]) -> None:
        """Those of the candidates that may be sent to, to the first section: all are bundled with it."""
        for value in candidates:
            if self._trickled == sdp.MOST_CANDIDATES or not sdp.may_send_to(
                value, self._options.webrtc_private
            ):
                continue
            self._trickled += 1
            candidate = candidate_from_sdp(value)
            candidate.sdpMid = self._connection.getTransceivers()[0].mid
            await self._connection.addIceCandidate(candidate)

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)


def ice_servers(options: CameraOptions) -> list[RTCIceServer]:
    """Those of the options and no other: aiortc's own default is a public one."""
    servers = []
    for server in listed(options.ice_servers):
        kind, _, rest = server.partition(":")
        secret, _, place = rest.rpartition("@")
        user, _, password = secret.partition(":")
        servers.append(RTCIceServer(f"{kind}:{place}", user or None, password or None))
    return servers


def offer_at(options: CameraOptions, reached: str | None) -> None:
    """Have ICE offer the addresses of ``webrtc_hosts``, or else all of this machine's and that at which the
    client reached it, which may be loopback. aioice has no other way to be told."""
    own = aioice.ice.get_host_addresses

    def addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
        hosts = listed(options.webrtc_hosts) or own(use_ipv4, use_ipv6) + ([reached] if reached else [])
        return list(dict.fromkeys(hosts))

    aioice.ice.get_host_addresses = addresses


async def watch(hello: WhipHello, post: Post, loop: PortLoop) -> Ended:
    """Wait for an offer, and watch who made it to the end."""
    heard: asyncio.Queue[ToCamera] = asyncio.Queue()
    post.listen(lambda message: loop.call_soon_threadsafe(heard.put_nowait, message))
    beating = asyncio.create_task(beat(loop))
    offer = await heard.get()
    assert isinstance(offer, Offer)
    offer_at(hello.cameras, offer.reached)
    peer = Peer(offer, hello, post)
    hearing = asyncio.create_task(hear(peer, heard))
    try:
        return await peer.run()
    except MMServeError as error:
        return Ended(error.message, Fault.of(error))
    finally:
        beating.cancel()
        hearing.cancel()


async def hear(peer: Peer, heard: asyncio.Queue[ToCamera]) -> None:
    while True:
        peer.take(await heard.get())


async def beat(loop: PortLoop) -> None:
    while True:
        loop.beat = time.monotonic()
        await asyncio.sleep(MIND_S)


def main(socket_fd: int, line_fd: int, parent_pid: int) -> None:
    loops: list[PortLoop] = []
    hello, post = begin(socket_fd, line_fd, parent_pid, lambda: loops[0].beat if loops else None)
    assert isinstance(hello, WhipHello)
    ports = hello.cameras.webrtc_ports
    loops.append(PortLoop(None if ports is None else port_range(ports)))
    try:
        with asyncio.Runner(loop_factory=lambda: loops[0]) as runner:
            ended = runner.run(watch(hello, post, loops[0]))
            post.say(ended)
            post.flush(LAST_WORDS_S)
            os._exit(0)  # at once: aiortc's decoder may be in the middle of something
    except MemoryError:
        said = (
            f"the camera's process needs more than {hello.cameras.camera_memory_mib} MiB (camera_memory_mib)"
        )
        post.say(Ended(said, Fault.of(MediaError(said, code="too_much_memory"))))
        post.flush(LAST_WORDS_S)
    os._exit(1)


if __name__ == "__main__":
    _, socket_fd, line_fd, parent_pid, _ = sys.argv
    main(int(socket_fd), int(line_fd), int(parent_pid))
