"""A clip's bytes, opened with PyAV: our bytes and nothing else."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import av

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.preprocess.image import check_size

# Containers that hold their own frames; none that points to other files or addresses.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,asf,flv,ogg,h264,hevc,av1,obu,"
    "ivf,yuv4mpegpipe,mjpeg,jpeg_pipe,nut,mxf"
)
DECODER_THREADS = 2
FAULTS = (av.FFmpegError, OSError, ValueError)  # what PyAV raises of damaged files


@dataclass(frozen=True)
class Source:
    """An encoded clip and the limits it is read under. It may be opened again and again."""

    data: bytes
    options: MediaOptions

    def open(self) -> Any:
        """A PyAV container over the bytes alone: protocols are off. MediaError if it is none."""
        guards = {
            "format_whitelist": CONTAINERS,
            "protocol_whitelist": "none",
            "max_pixels": str(self.options.max_image_pixels),
        }
        try:
            return av.open(io.BytesIO(self.data), options=guards, metadata_errors="replace")
        except FAULTS as error:
            raise MediaError(f"this is not a video that can be read: {self._why(error)}") from None

    def stream(self, container: Any) -> Any:
        """The first video stream that is no cover picture, its decoder kept to the pixel limit.

        A stream may change its size at any frame: the decoder leaves out what is beyond the limit.
        """
        videos = container.streams.video
        streams = [s for s in videos if not s.disposition & s.disposition.attached_pic]
        if not streams:
            raise MediaError(f"the file holds no video stream (it holds: {_contents(container)})")
        stream = streams[0]
        if stream.codec_context is None:
            raise MediaError("the video's codec is not supported")
        if stream.width and stream.height:
            check_size(stream.height, stream.width, self.options)
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = DECODER_THREADS
        stream.codec_context.options = {"max_pixels": str(self.options.max_image_pixels)}
        return stream

    def _why(self, error: Exception) -> str:
        if self.data[4:8] == b"ftyp" and b"moov" not in self.data:
            return "the file was cut off before its index"
        return reason(error)


def packets(
    container: Any, stream: Any, damage: list[str], check: Callable[[], None]
) -> Iterator[tuple[int, Any]]:
    """The stream's packets in the order they are stored, numbered; why reading ended early in ``damage``."""
    number = 0
    try:
        for packet in container.demux(stream):
            check()
            if packet.size:
                yield number, packet
                number += 1
    except FAULTS as error:
        damage.append(reason(error))


def reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]


def _contents(container: Any) -> str:
    kinds = {"cover picture" if s.type == "video" else s.type for s in container.streams}
    return ", ".join(sorted(kinds)) or "nothing"
