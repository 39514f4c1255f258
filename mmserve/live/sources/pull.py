"""The process of a camera that is pulled: PyAV over RTSP, HTTP or a file.

    python -m mmserve.live.sources.pull SOCKET_FD LINE_FD PARENT_PID ""

The main thread opens, reads and decodes, again and again; what is kept is sent on another (``Post``).
"""

import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import av
import av.error

from mmserve.core.config import CameraOptions
from mmserve.core.errors import MediaError, MMServeError
from mmserve.core.wire import Fault
from mmserve.live.sources.clock import SourceClock
from mmserve.live.sources.download import Download
from mmserve.live.sources.lookout import Lookout
from mmserve.live.sources.messages import Away, Ended, Live, PullHello, ToCamera, Watch
from mmserve.live.sources.own import Busy, begin
from mmserve.live.sources.post import Post
from mmserve.live.sources.relay import Relay, connected
from mmserve.live.sources.url import CameraUrl, checked, may_come_back, media_for
from mmserve.preprocess.address import FORBIDDEN, UNREACHABLE
from mmserve.preprocess.container import CONTAINERS, FAULTS, reason
from mmserve.preprocess.source import find_file

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between two tries
STEADY_S = 10.0  # of frames, and a camera that is lost is tried again at once
MOST_BAD = 500  # packets in a row that cannot be decoded
BEHIND_S = 1.0  # a file that has fallen back so far is shown on from where it is
LAST_WORDS_S = 2.0

# Of these the times that FFmpeg tells are of a frame rate that it assumes.
UNTIMED = {"mpjpeg", "mjpeg", "jpeg_pipe", "h264", "hevc", "av1", "obu", "mpegvideo", "m4v"}
PROBE = {"analyzeduration": "2000000"}  # microseconds of what comes, to find out what it is


class Opened(NamedTuple):
    """What comes of a camera. A ``paced`` one is a file, shown at the pace of its own times."""

    container: Any
    paced: bool
    relay: Relay | None = None


class Lost(Exception):
    """The camera has ended, or shows nothing any more; it may come back."""


class Pull:
    """One camera, until it is given up."""

    def __init__(self, hello: PullHello, post: Post, busy: Busy) -> None:
        self._hello = hello
        self._url = CameraUrl.read(hello.url)
        self._options: CameraOptions = hello.cameras
        self._media = media_for(hello.media, hello.cameras)
        self._post = post
        self._busy = busy
        self._lookout = Lookout(hello.policy, hello.cameras, hello.media, post)
        self._seen = time.monotonic()  # when there was a frame last

    def hear(self, message: ToCamera) -> None:
        if isinstance(message, Watch):
            self._lookout.watch(message.policy)

    def run(self) -> Ended:
        """Until a file has ended, the camera is refused, or has been away for too long."""
        tries = 0
        while True:
            began, seen = time.monotonic(), self._seen
            try:
                self._watch()
                return Ended("the file is at its end")
            except MediaError as error:
                if not may_come_back(error):
                    return Ended(error.message, Fault.of(error))
                why = error.message
            except Lost as lost:
                why = str(lost)
            if self._seen - began > STEADY_S and self._seen > seen:
                tries = 0
            away = time.monotonic() - self._seen
            if away > self._options.camera_away_s:
                said = f"no frame for {away:.0f} s: {why}"
                return Ended(said, Fault.of(MediaError(said, code=UNREACHABLE)))
            self._post.say(Away(why))
            time.sleep(min(FIRST_PAUSE_S * 2**tries, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))
            tries += 1

    def _watch(self) -> None:
        """Open the camera and look at it; return at the end of a file. Lost or MediaError otherwise."""
        try:
            with self._opened() as opened:
                stream = self._stream(opened.container)
                self._post.say(Live(_what(opened.container, stream)))
                while True:
                    self._play(opened, stream)
                    if not opened.paced:
                        raise self._lost(opened)
                    if not self._hello.loop:
                        return
                    self._rewind(opened)
        except av.error.HTTPClientError as error:
            raise MediaError(f"the camera refuses: {reason(error)}", code=FORBIDDEN) from None
        except av.error.ExitError:
            raise Lost(f"the camera was silent for {self._options.camera_idle_s:g} s") from None
        except FAULTS as error:
            raise Lost(f"the camera cannot be read: {reason(error)}") from None

    # ------------------------------------------------------------ opening

    @contextmanager
    def _opened(self) -> Iterator[Opened]:
        with ExitStack() as stack:
            opened = {"file": self._file, "http": self._http, "https": self._http}.get(
                self._url.scheme, self._rtsp
            )(stack)
            with closing(opened.container):
                yield opened

    def _file(self, stack: ExitStack) -> Opened:
        file = stack.enter_context(find_file(self._url.bare, self._hello.media).open("rb"))
        return Opened(self._container(file), True)

    def _http(self, stack: ExitStack) -> Opened:
        body = stack.enter_context(closing(Download(self._url, self._media)))
        kind = "mpjpeg" if body.kind == "multipart/x-mixed-replace" else None
        return Opened(self._container(body, kind), body.ends)

    def _rtsp(self, stack: ExitStack) -> Opened:
        """By way of the relay, which see."""
        idle_s = self._options.camera_idle_s
        numbers = asyncio.run(checked(self._url, self._hello.media, self._options))
        tls = self._url.host if self._url.scheme == "rtsps" else None
        relay = stack.enter_context(closing(Relay(connected(numbers, self._url.port, idle_s, tls), idle_s)))
        try:
            container = av.open(
                self._url.at("127.0.0.1", relay.port),
                format="rtsp",
                options={
                    "rtsp_transport": "tcp",
                    "protocol_whitelist": "tcp,rtp",
                    "fflags": "nobuffer",
                    **PROBE,
                },
                timeout=(idle_s, idle_s),
                metadata_errors="replace",
            )
        except FAULTS:
            if relay.refused:
                raise MediaError("the camera redirects, or speaks no RTSP", code=FORBIDDEN) from None
            raise
        return Opened(container, False, relay)

    def _lost(self, opened: Opened) -> Lost:
        if opened.relay is not None and opened.relay.silent:
            return Lost(f"the camera was silent for {self._options.camera_idle_s:g} s")
        return Lost("the camera has ended its stream")

    def _container(self, file: Any, kind: str | None = None) -> Any:
        """A container over these bytes alone: protocols are off."""
        guards = {"format_whitelist": f"{CONTAINERS},mpjpeg", "protocol_whitelist": "none"}
        return av.open(file, format=kind, options={**guards, **PROBE}, metadata_errors="replace")

    def _stream(self, container: Any) -> Any:
        streams = [s for s in container.streams.video if not s.disposition & s.disposition.attached_pic]
        if not streams or streams[0].codec_context is None:
            raise MediaError("the camera sends no video that can be decoded", code=FORBIDDEN)
        stream = streams[0]
        stream.thread_type = "SLICE"  # threads for frames would add their latency
        # What is somewhat too large is told as such (``Lookout``), the rest as what cannot be decoded.
        stream.codec_context.options = {"max_pixels": str(4 * self._options.camera_max_pixels)}
        return stream

    # ------------------------------------------------------------ watching

    def _play(self, opened: Opened, stream: Any) -> None:
        """Look at frames until there are no more."""
        pace = Pace() if opened.paced else None
        clock = SourceClock()
        timed = not UNTIMED & set(opened.container.format.name.split(","))
        bad = 0
        for packet in opened.container.demux(stream):
            received = time.monotonic()
            try:
                with self._busy:
                    frames = packet.decode()
            except FAULTS as error:
                self._lookout.lose()
                bad += 1
                if bad > MOST_BAD:
                    raise Lost(f"nothing of what it sends can be decoded: {reason(error)}") from None
                continue
            for frame in frames:
                bad = 0
                self._seen = time.monotonic()
                if pace is not None:
                    received = captured = pace.wait(frame.time)
                else:
                    captured = clock.captured(frame.time if timed else None, received)
                with self._busy:
                    self._lookout.see(frame, captured, received)

    def _rewind(self, opened: Opened) -> None:
        if self._url.scheme != "file":
            raise Lost("it is at its end, and is asked for again")
        opened.container.seek(0)


class Pace:
    """Waits until a file's frames are due."""

    def __init__(self) -> None:
        self._ahead: float | None = None  # this machine's time less the file's

    def wait(self, seconds: float | None) -> float:
        """Return, with the time, when the frame at ``seconds`` of the file is due."""
        now = time.monotonic()
        if seconds is None:
            return now
        if self._ahead is None or not -BEHIND_S < seconds + self._ahead - now < 60.0:
            self._ahead = now - seconds
        time.sleep(max(0.0, seconds + self._ahead - now))
        return time.monotonic()


def _what(container: Any, stream: Any) -> str:
    return (
        f"{stream.codec_context.name} {stream.width}x{stream.height} ({container.format.name.split(',')[0]})"
    )


def main(socket_fd: int, line_fd: int, parent_pid: int) -> None:
    busy = Busy()
    hello, post = begin(socket_fd, line_fd, parent_pid, lambda: busy.since)
    assert isinstance(hello, PullHello)
    try:
        pull = Pull(hello, post, busy)
        post.listen(pull.hear)
        ended = pull.run()
    except MMServeError as error:
        ended = Ended(error.message, Fault.of(error))
    except MemoryError:
        said = (
            f"the camera's process needs more than {hello.cameras.camera_memory_mib} MiB (camera_memory_mib)"
        )
        ended = Ended(said, Fault.of(MediaError(said, code="too_much_memory")))
    post.say(ended)
    post.flush(LAST_WORDS_S)
    os._exit(0)  # at once: threads of libraries may be in the middle of something


if __name__ == "__main__":
    _, socket_fd, line_fd, parent_pid, _ = sys.argv
    main(int(socket_fd), int(line_fd), int(parent_pid))
