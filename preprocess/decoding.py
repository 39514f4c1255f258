"""Packets to frames: the runs of packets that were planned, or all of them."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mmserve.preprocess.container import FAULTS, packets, reason

EVERYTHING = (range(sys.maxsize),)
# Decoders that tell themselves whether a picture is a key picture, so that a wrong mark is noticed.
STARTS_ANEW = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg1video", "mpeg2video", "mpeg4", "mjpeg")
# Where the stream marks for certain what no other picture refers to: its own layer or a higher one.
LEAVES_OUT = ("h264",)


def decoded(
    container: Any,
    stream: Any,
    runs: Sequence[range] | None,
    damage: list[str],
    check: Callable[[], None],
    wanted: Collection[int] = (),
) -> Iterator[tuple[int, Any]]:
    """Frames with their keys (presentation time, or number where there is none), in the order shown.

    ``runs`` are the packets to decode, None for all. With ``wanted``, frames that are neither wanted nor
    referred to may be left out. Packets that cannot be decoded are left out and noted in ``damage``; a
    run that does not begin with a key picture ends everything.
    """
    decoder = Decoder(stream, damage, wanted)
    feed = packets(container, stream, damage, check)
    for run in runs or EVERYTHING:
        decoder.start(at_key=run.start > 0)
        for at, packet in feed:
            if at >= run.start:
                yield from decoder.frames(packet)
            if at + 1 == run.stop:
                break
        yield from decoder.rest()
        if decoder.misled:
            return


class Decoder:
    """One stream's decoder. ``misled`` tells that the packet it was started at held no key picture."""

    def __init__(self, stream: Any, damage: list[str], wanted: Collection[int]) -> None:
        self.context = stream.codec_context
        self.damage = damage
        self.wanted = wanted if self.context.name in LEAVES_OUT else ()
        self.number = 0
        self.misled = False
        self._unproven = False
        self._entry: int | None = None

    def start(self, *, at_key: bool) -> None:
        """The next packet begins a run; ``at_key`` if nothing before it was decoded."""
        if self.number or at_key:
            self.context.flush_buffers()
        self._unproven, self._entry = at_key, None

    def frames(self, packet: Any) -> Iterator[tuple[int, Any]]:
        if self._unproven and self._entry is None:
            self._entry = packet.pts
        if self.wanted:
            self.context.skip_frame = "DEFAULT" if packet.pts in self.wanted else "NONREF"
        yield from self._decode(packet)

    def rest(self) -> Iterator[tuple[int, Any]]:
        """What the decoder still holds at the end of a run."""
        yield from self._decode(None)

    def _decode(self, packet: Any) -> Iterator[tuple[int, Any]]:
        try:
            decoded = self.context.decode(packet)
        except MemoryError:  # not the packet's fault: a clip must not be shorter where memory is
            raise
        except FAULTS as error:
            self.damage.append(reason(error))
            return
        for frame in decoded:
            key = frame.pts if frame.pts is not None else self.number
            self.number += 1
            if self._unproven and key == self._entry:
                self.misled = not frame.key_frame
                self._unproven = False
            if self.misled:
                return
            yield key, frame
