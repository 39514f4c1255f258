"""When each frame of a clip is shown, read from its packets without decoding them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmserve.core.errors import MediaError
from mmserve.preprocess.container import Source, packets
from mmserve.preprocess.decoding import STARTS_ANEW, decoded
from mmserve.preprocess.reading import Packets

FALLBACK_RATE = 25.0  # frames a second where the file does not say
MOST_PACKETS = 1 << 20  # eleven hours at 25 frames a second; an index may promise far more in a few bytes


@dataclass(frozen=True)
class Timeline:
    """The frames a file holds, in the order they are shown.

    ``keys`` are what a decoded frame is recognised by (its presentation time in the stream's clock, or its
    number where the file has no times), ``times`` their seconds from the first, ``rate`` frames a second.
    ``packets`` is None where they tell no times: such a file is read through. ``size`` (height, width) is
    what the container says of the stored frames.
    """

    keys: tuple[int, ...]
    times: tuple[float, ...]
    rate: float
    packets: Packets | None = None
    size: tuple[int, int] | None = None
    warnings: tuple[str, ...] = ()


def read_timeline(source: Source, check: Callable[[], None]) -> Timeline:
    """Read the packets' times, without decoding; decode and count where a container has none."""
    with source.open() as container:
        stream = source.stream(container)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        tick = float(stream.time_base or 0)
        size = (stream.height, stream.width) if stream.height and stream.width else None
        cut = _cut_off(source, stream)
        keys, table = _packet_times(container, stream, check)
    if table is None:
        keys = _frame_keys(source, check)
        tick = tick if _is_timed(keys) else 0.0
    return replace(_timed(keys, tick, rate), packets=table, size=size, warnings=cut)


def _packet_times(container: Any, stream: Any, check: Callable[[], None]) -> tuple[list[int], Packets | None]:
    """Times of the frames that are shown, sorted, and the table of all packets; None if any tells none."""
    times: list[int] = []
    starts: list[bool] = []
    shown: list[int] = []
    context = stream.codec_context
    anew = context.name in STARTS_ANEW or context.codec.intra_only
    for number, packet in packets(container, stream, [], check):  # where it breaks off, the clip ends
        _check_count(number)
        if packet.pts is None:
            return [], None
        times.append(packet.pts)
        starts.append(packet.is_keyframe and anew)
        if not packet.is_discard and _is_shown(stream, packet):
            shown.append(packet.pts)
    table = Packets(np.array(times, np.int64), np.array(starts, bool)) if shown else None
    return sorted(set(shown)), table


def _frame_keys(source: Source, check: Callable[[], None]) -> list[int]:
    """Of all frames, decoded to count them."""
    with source.open() as container:
        frames = decoded(container, source.stream(container), None, [], check)
        keys = {key for key, _ in frames}
    _check_count(len(keys))
    return sorted(keys)


def _is_shown(stream: Any, packet: Any) -> bool:
    """VP8 keeps pictures that are only referred to in packets of their own (RFC 6386, 9.1: show_frame)."""
    return stream.codec_context.name != "vp8" or bool(memoryview(packet)[0] & 0x10)


def _cut_off(source: Source, stream: Any) -> tuple[str, ...]:
    """A file whose index outlives its data."""
    index = stream.index_entries
    _check_count(len(index))
    inside = (at for at in reversed(range(len(index))) if index[at].pos + index[at].size <= len(source.data))
    missing = len(index) - 1 - next(inside, -1)
    return (f"the file is cut off: {missing} of {len(index)} indexed packets are missing",) if missing else ()


def _check_count(packets: int) -> None:
    if packets > MOST_PACKETS:
        raise MediaError(f"the video has more than {MOST_PACKETS} packets, the most that is allowed")


def _is_timed(keys: list[int]) -> bool:
    return keys != list(range(len(keys)))


def _timed(keys: list[int], tick: float, rate: float) -> Timeline:
    if not keys:
        raise MediaError("no frame of the video can be decoded")
    if not tick:
        rate = rate or FALLBACK_RATE
        return Timeline(tuple(keys), tuple(i / rate for i in range(len(keys))), rate)
    times = [(key - keys[0]) * tick for key in keys]
    measured = (len(times) - 1) / times[-1] if times[-1] > 0 else 0.0
    if not rate or (measured and abs(rate - measured) > 0.02 * measured):
        rate = measured or rate or FALLBACK_RATE
    even = [i / rate for i in range(len(times))]
    if all(abs(a - b) <= tick * 1.01 for a, b in zip(times, even, strict=True)):
        times = even  # constant rate within the clock's precision: the exact times
    return Timeline(tuple(keys), tuple(times), rate)
