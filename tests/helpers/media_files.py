"""Picture and clip files, made in memory."""

import io
import pathlib
import struct
import tempfile
from fractions import Fraction

import av
import numpy as np
from PIL import Image


def picture_file(image, kind="PNG", **options):
    """``image`` is a PIL picture or uint8 [H, W, C]."""
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shade(i):
    """A grey level that survives lossy coding well enough to name a frame."""
    return (i * 8) % 248 + 4


def clip_file(
    count, *, rate=10, times=None, kind="mp4", codec="libx264", size=(64, 96), options=None, audio=False
):
    """Frame i is grey ``shade(i)``. ``times`` in seconds make the rate variable."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "clip"
        with av.open(str(path), "w", format=kind, options=options or {}) as container:
            write_clip(container, count, rate, times, codec, size, audio)
        return path.read_bytes()


def write_clip(container, count, rate, times, codec, size, audio):
    stream = container.add_stream(codec, rate=rate)
    stream.height, stream.width = size
    stream.pix_fmt = {"gif": "rgb8", "rawvideo": "yuv420p"}.get(codec, "yuv420p")
    clock = Fraction(1, 1000) if times else Fraction(1, rate)
    stream.time_base = stream.codec_context.time_base = clock
    if audio:
        sound = container.add_stream("aac", rate=16000)
        add_silence(container, sound)
    for i in range(count):
        frame = av.VideoFrame.from_ndarray(np.full((*size, 3), shade(i), np.uint8), format="rgb24")
        frame.pts = round(times[i] * 1000) if times else i
        frame.time_base = clock
        container.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
    container.mux(stream.encode())


def add_silence(container, stream):
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
    frame.sample_rate, frame.pts = 16000, 0
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def sound_file():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        add_silence(container, container.add_stream("aac", rate=16000, layout="mono"))
    return file.getvalue()


def rotated(mp4, degrees):
    """An mp4 with a display matrix: players turn the picture ``degrees`` clockwise."""
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    matrix = [cos, sin, 0, -sin, cos, 0, 0, 0, 0x40000000]
    matrix[:2], matrix[3:5] = [cos << 16, sin << 16], [-sin << 16, cos << 16]
    at = mp4.index(b"tkhd") + 4 + 40
    return mp4[:at] + struct.pack(">9i", *matrix) + mp4[at + 36 :]
