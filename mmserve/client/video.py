"""Pictures of a camera of this machine, a clip or a stream, as JPEG files at a rate of one's own."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from mmserve.core.errors import MediaError

QUALITY = 85  # of the JPEGs
SILENCE_S = 15.0  # after which a stream counts as lost
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # before a stream that was lost is opened again
BEHIND_S = 1.0  # a clip that has fallen back so far is shown on from where it is


class Source(Struct, frozen=True, kw_only=True):
    """What to open: ``name`` is a path or URL, ``kind`` FFmpeg's name of a device's input. A ``clip``, as
    whatever has an end, is shown at the pace of its own times, again and again with ``loop``."""

    name: str
    kind: str | None = None
    clip: bool = False
    loop: bool = False

    @property
    def shown(self) -> str:
        """Without user, password and query: any of them may be a secret."""
        if "://" not in self.name:
            return self.name
        parts = urlsplit(self.name)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def device(name: str, system: str = sys.platform) -> Source:
    """A camera of this machine, by its number or as FFmpeg names it. MediaError on an unknown ``system``."""
    number = name.isdecimal()
    if system.startswith("linux"):
        return Source(name=f"/dev/video{name}" if number else name, kind="v4l2")
    if system == "darwin":
        return Source(name=f"{name}:none" if number else name, kind="avfoundation")
    if system == "win32":
        return Source(name=name if name.startswith("video=") else f"video={name}", kind="dshow")
    raise MediaError(f"cameras of {system} are not known; give a file or URL", param="device")


class Recorder:
    """Reads ``source`` on the thread that calls ``run``; gives ``put`` at most ``fps`` JPEG files a second,
    of at most ``max_pixels``, each with the moment of ``time.monotonic`` at which it was seen."""

    def __init__(
        self, source: Source, put: Callable[[bytes, float], object], fps: float, max_pixels: int
    ) -> None:
        self._source, self._put = source, put
        self._pause, self._max_pixels = 1.0 / fps, max_pixels
        self._stop = threading.Event()
        self._due = 0.0
        self._ends = source.clip
        self.shown = 0

    def stop(self) -> None:
        """Have ``run`` return soon; any thread may."""
        self._stop.set()

    def run(self, lost: Callable[[str], None]) -> None:
        """Until a clip is at its end, or ``stop``. MediaError for what cannot be opened, or a device that is
        gone; a stream that was there is opened again, which ``lost`` hears of."""
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            before = self.shown
            try:
                self._record()
                if self._ends or self._stop.is_set():
                    return
                why = "it has ended"
            except MediaError as error:
                if self._source.kind or self._ends or not self.shown:
                    raise
                why = error.message
            pause = FIRST_PAUSE_S if self.shown > before else min(2 * pause, LONGEST_PAUSE_S)
            lost(f"{why}; it is opened again in {pause:.1f} s")
            self._stop.wait(pause)

    def _record(self) -> None:
        import av

        try:
            with closing(self._opened()) as container:
                if not container.streams.video:
                    raise MediaError(f"{self._source.shown} holds no video")
                self._ends |= self._source.kind is None and container.duration is not None
                for frame in self._frames(container):
                    self._take(frame)
                    if self._stop.is_set():
                        return
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise MediaError(f"{self._source.shown} cannot be read: {_reason(error)}") from None

    def _opened(self) -> Any:
        import av

        options = {"rtsp_transport": "tcp"} if self._source.name.startswith("rtsp") else {}
        timeout = None if self._source.clip else SILENCE_S
        return av.open(self._source.name, format=self._source.kind, options=options, timeout=timeout)

    def _frames(self, container: Any) -> Iterator[Any]:
        """The frames, those of a clip when they are due."""
        stream = container.streams.video[0]
        if not self._ends:
            yield from container.decode(stream)
            return
        while True:
            yield from self._paced(container.decode(stream))
            if not self._source.loop:
                return
            container.seek(0)

    def _paced(self, frames: Iterator[Any]) -> Iterator[Any]:
        ahead: float | None = None  # this machine's time less the clip's
        for frame in frames:
            if frame.time is not None:
                now = time.monotonic()
                if ahead is None or frame.time + ahead < now - BEHIND_S:
                    ahead = now - frame.time
                self._stop.wait(max(0.0, frame.time + ahead - now))
            yield frame

    def _take(self, frame: Any) -> None:
        """Give the frame on, if it is time for one."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = max(self._due + self._pause, now - self._pause)
        self._put(jpeg(frame, self._max_pixels), now)
        self.shown += 1


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


def jpeg(frame: Any, max_pixels: int) -> bytes:
    """A frame of PyAV as a JPEG file, made smaller where it has more than ``max_pixels``."""
    import cv2

    scale = min(1.0, (max_pixels / (frame.width * frame.height)) ** 0.5)
    width, height = max(2, int(frame.width * scale)), max(2, int(frame.height * scale))
    pixels = frame.to_ndarray(format="bgr24", width=width, height=height)
    done, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    if not done:
        raise MediaError("the frame cannot be made a JPEG file")
    return bytes(data)
