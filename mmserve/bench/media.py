"""Pictures and clips to measure with: seeded noise in octaves, which compresses about as photographs do."""

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Sample:
    """An encoded file. ``frames`` is how many pictures it holds, 1 for a still."""

    name: str
    data: bytes
    frames: int = 1


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """An RGB picture with detail at every scale."""
    rng = np.random.default_rng(seed)
    total = np.full((height, width, 3), 128, np.float32)
    octaves = int(np.log2(max(height, width)))
    for octave in range(1, octaves):
        coarse = (max(2, height >> (octaves - octave)), max(2, width >> (octaves - octave)))
        noise = Image.fromarray(rng.integers(0, 256, (*coarse, 3), dtype=np.uint8))
        fine = np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
        total += (fine - 128) / np.float32(1.4**octave)
    return Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))


def still(height: int, width: int, kind: str, seed: int = 0) -> Sample:
    """A photograph as a file of ``kind`` (JPEG, PNG, WEBP)."""
    file = io.BytesIO()
    photograph(height, width, seed).save(file, kind, quality=90)
    return Sample(f"{kind} {width}x{height}", file.getvalue())


def clip(
    height: int, width: int, seconds: int, rate: int = 30, codec: str = "libx264", seed: int = 0
) -> Sample:
    """A slow pan over a photograph, ``rate`` frames a second, a key frame every two seconds, as mp4."""
    wide = np.asarray(photograph(height, width + seconds * rate, seed))
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream(
            codec, rate=rate, options={"g": str(2 * rate), "preset": "veryfast"}
        )
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for i in range(seconds * rate):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(wide[:, i : i + width]), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Sample(f"{codec} {width}x{height}, {seconds} s", file.getvalue(), seconds * rate)
