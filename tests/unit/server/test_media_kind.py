import pytest

from mmserve.media import is_video


@pytest.mark.parametrize(
    "start",
    [
        b"\x00\x00\x00\x20ftypisom",
        b"\x00\x00\x00\x18ftypmp42",
        b"\x00\x00\x00\x14ftypqt  ",
        b"\x1a\x45\xdf\xa3\x01\x00\x00\x00\x00",
        b"RIFF\x00\x00\x00\x00AVI LIST",
    ],
)
def test_video_containers(start):
    assert is_video(start + bytes(20))


@pytest.mark.parametrize(
    "start",
    [
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a",
        b"RIFF\x00\x00\x00\x00WEBPVP8 ",
        b"\x00\x00\x00\x1cftypavif",
        b"\x00\x00\x00\x18ftypheic",
        b"",
    ],
)
def test_pictures_and_nothing(start):
    assert not is_video(start + bytes(20) if start else b"")
