"""HEIC pictures, where the plug-in for them is installed."""

import importlib
import importlib.util
from functools import cache

from mmserve.core.errors import MediaError

HEIF = "HEIF"  # Pillow's name of the format
EXTRA = "mmserve[heif]"
# Major brands of ISO 23008-12 files whose pictures are HEVC. AVIF is read by Pillow itself.
BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def is_heif(data: bytes) -> bool:
    """Whether a file says that it is HEIF, and not that it is compatible with AVIF."""
    size = int.from_bytes(data[:4], "big")
    return data[4:8] == b"ftyp" and data[8:12] in BRANDS and b"avif" not in data[16 : min(size, 256)]


def has_heif() -> bool:
    """Whether the plug-in is installed; it is not loaded to find out."""
    return importlib.util.find_spec("pillow_heif") is not None


@cache
def load_heif() -> None:
    """Teach Pillow the format. MediaError that names the extra when the plug-in is not installed."""
    if not has_heif():
        raise MediaError(
            f"HEIC pictures are not read here: the server needs the extra {EXTRA}; send JPEG instead"
        )
    importlib.import_module("pillow_heif").register_heif_opener(thumbnails=False)
