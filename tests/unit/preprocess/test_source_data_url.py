"""Data URLs and base64, in every spelling that senders use."""

import asyncio
import base64
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.preprocess import data_url
from mmserve.preprocess.data_url import decode_base64, decode_data_url, decode_frames
from mmserve.preprocess.source import Fetcher

DATA = bytes(range(256))
LIMIT = 1 << 20


def encoded(data=DATA):
    return base64.b64encode(data).decode()


def fetched(ref, media, param=None, kind="image"):
    return asyncio.run(Fetcher(media).fetch(ref, param, kind))


@pytest.mark.parametrize(
    "ref",
    [
        f"data:image/png;base64,{encoded()}",
        f"DATA:IMAGE/PNG;Base64,{encoded()}",
        f"data:;base64,{encoded()}",
        f"data:base64;base64,{encoded()}",
        f"data:image/png;name=a.png;charset=utf-8;base64,{encoded()}",
        f"data:image/png;base64;charset=utf-8,{encoded()}",
        f'data:image/png;name="a;b,c";base64,{encoded()}',
        f'data:image/png;name="a\\",b";base64,{encoded()}',
        f'data:image/png;name=a"b;base64,{encoded()}',
        f"data:image/png ; base64 ,{encoded()}",
        f"  data:image/png;base64, {encoded()[:40]}\n{encoded()[40:]} ",
        f"data:image/png;base64,{encoded().rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
        f"data:image/png;base64,{encoded().replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
        "data:application/octet-stream," + "".join(f"%{b:02x}" for b in DATA),
        'data:application/octet-stream;name="base64;base64",' + "".join(f"%{b:02x}" for b in DATA),
    ],
)
def test_data_urls_in_every_spelling(options, ref):
    assert fetched(ref, options) == DATA


@pytest.mark.parametrize(
    "ref",
    [
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:;base64,abcde",
        "data:;base64,§§§§",
        "data:;base64,a",
        "data:;base64,QQ==QQ==",
        "data:;base64,ab#cde",
    ],
)
def test_broken_data_urls_name_the_part_and_not_the_content(options, ref):
    with pytest.raises(MediaError) as caught:
        fetched(ref, options, "messages[0].content[1].image_url")
    assert caught.value.param == "messages[0].content[1].image_url"
    assert "abcde" not in caught.value.message


def test_data_urls_are_limited():
    small = MediaOptions(max_image_bytes=100)
    for ref in (f"data:;base64,{encoded(bytes(200))}", "data:," + "%00" * 101, "data:," + "a" * 2000):
        with pytest.raises(MediaError, match="allowed"):
            fetched(ref, small)
    assert fetched(f"data:;base64,{encoded(bytes(200))}", small, kind="video") == bytes(200)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 49151, 49152, 49153, 200_001])
def test_pieces_join_to_the_whole(size):
    data = bytes(i * 7 % 251 for i in range(size))
    assert decode_base64(encoded(data)) == data
    assert decode_base64(base64.urlsafe_b64encode(data).decode().rstrip("=")) == data


def test_padding_between_pieces_is_an_error():
    piece = "A" * (data_url.STEP - 1) + "="
    with pytest.raises(MediaError):
        decode_base64(piece + "AAAA")


@given(st.binary(min_size=1, max_size=300), st.integers(1, 80), st.booleans())
@settings(max_examples=100, derandomize=True, deadline=None)
def test_wrapped_and_url_safe_base64_is_read(data, width, url_safe):
    text = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(data).decode()
    lines = "\r\n".join(text[i : i + width] for i in range(0, len(text), width))
    assert decode_data_url(f"data:;base64,{lines}", LIMIT) == data


@given(
    st.one_of(
        st.text(max_size=200), st.from_regex(r"data:[\w/;\"=,%\\]*(;base64)?,[\w+/=%-]*", fullmatch=True)
    )
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_text_is_bytes_or_a_media_error(text):
    for read in (lambda: decode_data_url(text, LIMIT), lambda: decode_frames(text, LIMIT, 4)):
        with suppress(MediaError):
            assert read()


# ---------------------------------------------------------------- clips that were cut to pictures


def frames_url(*frames, kind="video/jpeg"):
    return f"data:{kind};base64," + ",".join(map(encoded, frames))


@pytest.mark.parametrize("kind", ["video/jpeg", "Video/JPEG;fps=2", "video/png", "video/webp"])
def test_a_data_url_of_frames_is_pictures(options, kind):
    assert fetched(frames_url(b"one", b"two", kind=kind), options, kind="video") == (b"one", b"two")
    assert fetched(frames_url(b"one", kind=kind), options, kind="video") == (b"one",)


def test_other_clips_are_files(options):
    assert fetched(frames_url(b"one", kind="video/mp4"), options, kind="video") == b"one"


def test_frames_are_limited_in_number_and_size():
    with pytest.raises(MediaError, match="more than 2 frames"):
        fetched(frames_url(*[b"x"] * 3), MediaOptions(max_video_frames=2), kind="video")
    with pytest.raises(MediaError, match="more than 100 bytes"):
        fetched(frames_url(bytes(60), bytes(60)), MediaOptions(max_video_bytes=100), kind="video")
    with pytest.raises(MediaError, match="frame 1"):
        fetched(frames_url(b"x", b"", b"y"), MediaOptions(), kind="video")
