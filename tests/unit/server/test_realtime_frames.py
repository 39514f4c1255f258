"""Binary messages: with a header or without, and whose clock the capture time is of."""

import struct
import time

import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.server.realtime_frames import (
    HAS_TIME,
    HEADER,
    MAGIC,
    UNIX_TIME,
    FrameReader,
    SenderClock,
    looks_like_picture,
)

JPEG = b"\xff\xd8\xff\xe0 and so on"


def framed(seq, seconds=0.0, flags=0, data=JPEG, version=1):
    return HEADER.pack(MAGIC, version, flags, seq, int(seconds * 1e6)) + data


def test_the_header_is_as_documented():
    assert HEADER.size == 16
    assert framed(7, 2.5, 1)[:16] == b"MF\x01\x01" + struct.pack(">IQ", 7, 2_500_000)


def test_plain_pictures_are_numbered_as_they_come():
    reader = FrameReader(headers=False, clock=iter([10.0, 11.0]).__next__)
    first, second = reader.read(JPEG), reader.read(JPEG)
    assert (first.seq, first.data, first.captured, first.received) == (1, JPEG, 10.0, 10.0)
    assert (second.seq, second.captured) == (2, 11.0)


def test_without_the_subprotocol_a_header_is_no_header():
    frame = FrameReader(headers=False).read(framed(7))
    assert (frame.seq, frame.data) == (1, framed(7))


def test_a_header_gives_the_number_and_leaves_the_picture():
    frame = FrameReader(headers=True, clock=lambda: 5.0).read(framed(4_000_000_000))
    assert (frame.seq, frame.data, frame.captured) == (4_000_000_000, JPEG, 5.0)


def test_a_header_is_optional_for_each_frame():
    reader = FrameReader(headers=True)
    assert [reader.read(m).seq for m in (JPEG, framed(90), JPEG)] == [1, 90, 3]


def test_unix_time_is_taken_as_it_is():
    frame = FrameReader(headers=True).read(framed(1, time.time() - 2.0, HAS_TIME | UNIX_TIME))
    assert frame.received - frame.captured == pytest.approx(2.0, abs=0.5)


def test_a_capture_in_the_future_is_now():
    frame = FrameReader(headers=True).read(framed(1, time.time() + 60.0, HAS_TIME | UNIX_TIME))
    assert frame.captured == frame.received


def test_the_fastest_frame_sets_the_clock_of_a_sender():
    clock = SenderClock()
    assert clock.here(1.0, 101.2) == 101.2  # the first took no time as far as anybody knows
    assert clock.here(2.0, 102.1) == pytest.approx(102.1)  # faster: now this one did
    assert clock.here(3.0, 103.6) == pytest.approx(103.1)  # half a second on its way


def test_a_clock_that_drifts_is_followed():
    clock = SenderClock()
    ages = []
    for second in range(300):
        received = 1000.0 + second
        told = second * 0.999  # it loses a millisecond each second
        ages.append(received - clock.here(told, received))
    assert max(ages) < 0.05  # without forgetting it would be 0.3 by now


def test_a_clock_that_begins_anew_is_believed_at_once():
    clock = SenderClock()
    clock.here(5000.0, 100.0)
    assert clock.here(0.5, 101.0) == 101.0


@pytest.mark.parametrize("message", [b"MF", framed(1)[:15], framed(1, version=2)])
def test_a_header_of_another_version_or_cut_off_is_refused(message):
    with pytest.raises(InvalidRequest, match="16 bytes and version 1"):
        FrameReader(headers=True).read(message)


def test_pictures_are_told_by_their_first_bytes():
    assert looks_like_picture(JPEG)
    assert looks_like_picture(b"\x89PNG\r\n\x1a\n....")
    assert looks_like_picture(b"RIFF\x00\x00\x00\x00WEBPVP8 ")
    assert not any(map(looks_like_picture, (b"", b"{}", b"GIF89a", b"RIFF\x00\x00\x00\x00AVI ", b"\xff\xd8")))
