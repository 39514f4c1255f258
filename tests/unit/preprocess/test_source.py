"""References of every kind: who is asked for them, and files under the media root."""

import asyncio
import os

import pytest

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.preprocess.source import Fetcher

DATA = bytes(range(256))


def load_source(ref, media):
    return asyncio.run(Fetcher(media).fetch(ref))


@pytest.mark.parametrize(
    "ref", ["ftp://a/b", "javascript:1", "hello", "", "C:\\a.png", "gopher://x", "/etc/passwd", "file"]
)
def test_other_schemes_are_refused(options, ref):
    with pytest.raises(MediaError, match="data:"):
        load_source(ref, options)


# ---------------------------------------------------------------- files


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a b.png").write_bytes(DATA)
    (tmp_path / "secret.png").write_bytes(DATA)
    (tmp_path / "root" / "link.png").symlink_to(tmp_path / "secret.png")
    return tmp_path / "root"


def test_files_under_the_media_root(root):
    media = MediaOptions(media_root=str(root))
    assert load_source(f"file://{root}/a%20b.png", media) == DATA
    assert load_source(f"file://localhost{root}/a%20b.png", media) == DATA


def test_refusals_do_not_tell_whether_a_file_exists(root):
    media = MediaOptions(media_root=str(root))
    said = set()
    for path in ("link.png", "../secret.png", "../nothing.png", "%2e%2e/secret.png", "no.png", "", "a%00b"):
        with pytest.raises(MediaError) as caught:
            load_source(f"file://{root}/{path}", media)
        said.add((caught.value.message, caught.value.code))
    with pytest.raises(MediaError) as caught:
        load_source(f"file://{root}/a%20b.png", MediaOptions())
    assert said == {(caught.value.message, caught.value.code)}


def test_hosts_pipes_and_large_files_are_refused(root):
    media = MediaOptions(media_root=str(root), max_image_bytes=100)
    os.mkfifo(root / "pipe")
    for ref in (f"file://elsewhere{root}/a%20b.png", f"file://{root}/pipe", f"file://{root}/a%20b.png"):
        with pytest.raises(MediaError):
            load_source(ref, media)
