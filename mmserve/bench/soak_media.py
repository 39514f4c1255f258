"""Pictures and clips for a soak: known ones in every lossless form, new ones without end, and broken ones."""

import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from mmserve.bench.workload import data_url

# What makes them small takes time that the server under test would lack.
LOSSLESS: dict[str, dict[str, Any]] = {
    "PNG": {"compress_level": 1},
    "WEBP": {"lossless": True, "method": 0, "quality": 0},
    "BMP": {},
    "TIFF": {},
}
SPECKLE = 8  # a change of a pixel that no eye sees, and that makes a new picture to every cache


@dataclass(frozen=True)
class Known:
    """A sample that ships with mmserve. Each of ``files`` holds the same pixels, as (MIME type, bytes);
    ``pixels`` are those of a picture, uint8 RGB [H, W, 3]."""

    name: str
    kind: Literal["image", "video"]
    files: tuple[tuple[str, bytes], ...]
    pixels: np.ndarray | None = None

    def part(self, choose: random.Random) -> dict[str, Any]:
        """It in one of its forms; a clip gets bytes that no other has, around the same frames."""
        mime, data = choose.choice(self.files)
        return _part(self.kind, mime, data if self.kind == "image" else data + _pad(choose))


def known() -> list[Known]:
    """All samples that ship with the bundled model."""
    folder = Path(str(files("mmserve.models.tiny") / "samples"))
    rows = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    return [_known(row["file"], row["kind"], (folder / row["file"]).read_bytes()) for row in rows]


def _known(name: str, kind: Any, data: bytes) -> Known:
    if kind == "video":
        return Known(name, kind, (("video/mp4", data),))
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    forms = [(f"image/{form.lower()}", _saved(picture, form)) for form in LOSSLESS]
    return Known(name, kind, (("image/jpeg", data), *forms), np.asarray(picture))


def new_picture(choose: random.Random, pictures: Sequence[Known]) -> dict[str, Any]:
    """A known picture with one pixel changed, in a form chosen at random."""
    array = choose.choice([p.pixels for p in pictures if p.pixels is not None]).copy()
    row, column = choose.randrange(array.shape[0]), choose.randrange(array.shape[1])
    array[row, column] ^= np.array([choose.randrange(1, SPECKLE) for _ in range(3)], np.uint8)
    form = choose.choice(list(LOSSLESS))
    return _part("image", f"image/{form.lower()}", _saved(Image.fromarray(array), form))


def broken(choose: random.Random, samples: Sequence[Known]) -> dict[str, Any]:
    """A part that must be refused."""
    sample = choose.choice(samples)
    mime, data = sample.files[0]
    noise = choose.randbytes(400)
    return _part(sample.kind, mime, choose.choice((data[: len(data) // 3], b"%PDF-1.7 " + noise, noise)))


def _part(kind: str, mime: str, data: bytes) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(data, mime)}}


def _saved(picture: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **LOSSLESS[form])
    return file.getvalue()


def _pad(choose: random.Random) -> bytes:
    """A box of an MP4 that players skip."""
    return (16).to_bytes(4, "big") + b"free" + choose.randbytes(8)
