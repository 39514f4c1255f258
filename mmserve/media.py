"""Bytes of a picture or clip: fetched from where a caller says they are, and told apart."""

from mmserve.chat_format import MediaRef
from mmserve.core.config import MediaOptions
from mmserve.core.messages import ImagePart, VideoPart
from mmserve.preprocess.source import fetch

_VIDEO_BRANDS = (b"iso", b"mp4", b"avc1", b"qt  ", b"M4V", b"3gp", b"dash", b"MSNV")
_VIDEO_STARTS = (b"\x1a\x45\xdf\xa3", b"OggS", b"FLV\x01", b"\x30\x26\xb2\x75", b"\x00\x00\x01\xba", b"G@")


async def fetch_media(ref: MediaRef, limits: MediaOptions) -> bytes:
    """The bytes that ``ref`` names; MediaError with its ``param`` if they cannot be had."""
    return await fetch(ref.source, limits, ref.param, ref.kind)


def media_part(data: bytes, param: str) -> ImagePart | VideoPart:
    """A part for a whole file, by what its first bytes say it is."""
    return VideoPart(data=data, param=param) if is_video(data) else ImagePart(data=data, param=param)


def is_video(data: bytes) -> bool:
    """Whether the signature is that of a video container (a GIF counts as a picture)."""
    if data[4:8] == b"ftyp":
        return data[8:12].startswith(_VIDEO_BRANDS)
    return data.startswith(_VIDEO_STARTS) or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")
