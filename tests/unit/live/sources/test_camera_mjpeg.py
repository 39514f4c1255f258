"""Pictures out of a multipart body: every way in which cameras write it, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.errors import InvalidRequest
from mmserve.live.sources.mjpeg import MOST_HEAD, Parts, boundary_of

PICTURES = [
    b"\xff\xd8one\xff\xd9",
    b"\xff\xd8" + bytes(range(256)) * 3 + b"\xff\xd9",
    b"\xff\xd8\r\n--\xff\xd9",
]


def body(pictures, *, length=True, line=b"\r\n", first=b"", closed=False):
    out = first
    for picture in pictures:
        head = [b"--frame", b"Content-Type: image/jpeg"]
        if length:
            head.append(b"Content-Length: %d" % len(picture))
        out += line.join([*head, b"", b""]) + picture + line
    return out + (b"--frame--" + line if closed else b"--frame" + line)


def fed(data, cuts=(), boundary=b"frame", most=1 << 16):
    parts, found, start = Parts(boundary, most), [], 0
    for cut in [*sorted(cuts), len(data)]:
        found += parts.feed(data[start:cut])
        start = cut
    return found, parts


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("line", [b"\r\n", b"\n"])
@pytest.mark.parametrize("first", [b"", b"\r\n", b"\r\n\r\n"])
def test_pictures_come_out_whole_however_they_are_written(length, line, first):
    assert fed(body(PICTURES, length=length, line=line, first=first))[0] == PICTURES


@given(st.lists(st.integers(0, 1200), max_size=30), st.booleans())
def test_pictures_come_out_whole_wherever_the_body_is_cut(cuts, length):
    data = body(PICTURES, length=length, closed=True)
    found, parts = fed(data, [cut for cut in cuts if cut < len(data)])
    assert found == PICTURES
    assert parts.ended


def test_a_boundary_that_is_declared_with_its_dashes_is_the_same_one():
    assert fed(body(PICTURES), boundary=b"--frame")[0] == PICTURES


def test_a_picture_waits_for_its_end():
    parts = Parts(b"frame", 1 << 16)
    data = body(PICTURES[:1], length=False)
    assert list(parts.feed(data[:-10])) == []
    assert list(parts.feed(data[-10:])) == PICTURES[:1]


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"--other\r\n\r\nx", b"x" * (MOST_HEAD + 1), b"\0" * 100_000]
)
def test_junk_is_an_error_and_is_not_kept(junk):
    with pytest.raises(InvalidRequest):
        fed(junk)


def test_a_number_of_bytes_that_is_none_is_an_error():
    with pytest.raises(InvalidRequest, match="Content-Length is no number"):
        fed(b"--frame\r\nContent-Length: many\r\n\r\nx")


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("step", [1, 100, 10_000])
def test_a_picture_beyond_the_limit_is_told_of_and_never_held(length, step):
    large = b"\xff\xd8\r\n--fram" + b"x" * 5000
    data = body([PICTURES[0], large, PICTURES[2]], length=length, closed=True)
    parts, found, most = Parts(b"frame", 1000), [], 0
    for i in range(0, len(data), step):
        found += parts.feed(data[i : i + step])
        most = max(most, len(parts._held))
    assert found == [PICTURES[0], None, PICTURES[2]]
    assert parts.ended
    assert most <= 1000 + len(b"\r\n--frame") + step


def test_a_picture_of_just_the_most_bytes_is_let_through():
    for length in (True, False):
        exact, beyond = b"x" * 1000, b"x" * 1001
        assert fed(body([exact, beyond], length=length), most=1000)[0] == [exact, None]


def test_the_content_type_names_the_boundary():
    assert boundary_of("multipart/x-mixed-replace;boundary=ffmpeg") == b"ffmpeg"
    assert boundary_of('Multipart/X-Mixed-Replace; boundary="a b"; x=y') == b"a b"
    assert boundary_of("image/jpeg") is None
    for wrong in ("multipart/x-mixed-replace", "multipart/x-mixed-replace;boundary=" + "x" * 300):
        with pytest.raises(InvalidRequest, match="boundary"):
            boundary_of(wrong)
