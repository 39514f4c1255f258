"""What commands share: the model's flags, a quiet set-up, and media named on the command line."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mmserve.core.config import Config, MediaOptions, add_arguments
from mmserve.core.errors import MediaError

if TYPE_CHECKING:
    from mmserve.core.messages import ImagePart, VideoPart
    from mmserve.service import Service

STDIN = "-"
SECTIONS = ("model", "runner", "media", "cache", "scheduler")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, *SECTIONS)


def quiet() -> None:
    """Only warnings reach the terminal, so that it belongs to the model's words."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


@contextmanager
def loaded(config: Config) -> Iterator["Service"]:
    """The model of ``config``, ready to answer on a quiet terminal, and closed afterwards."""
    quiet()
    from mmserve.service import Service  # loads torch, which --help and wrong flags need not wait for

    service = Service.load(config)
    try:
        yield service
    finally:
        service.close()


async def media(source: str, limits: MediaOptions) -> "ImagePart | VideoPart":
    """The picture or clip at a path or URL or on standard input; MediaError if there is none."""
    from mmserve.media import media_part

    data = await _bytes(source, limits)
    if not data:
        raise MediaError(f"{source} is empty", param=source)
    return media_part(data, source)


async def _bytes(source: str, limits: MediaOptions) -> bytes | tuple[bytes, ...]:
    if source == STDIN:
        return await asyncio.to_thread(sys.stdin.buffer.read)
    if is_url(source):
        from mmserve.chat_format import MediaRef
        from mmserve.media import fetch_media

        return (await fetch_media(MediaRef("video", source, source), limits)).data  # the larger limit
    try:
        return await asyncio.to_thread(Path(source).expanduser().read_bytes)
    except OSError as error:
        raise MediaError(f"cannot read {source}: {error.strerror}", param=source) from None


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://", "data:"))
