"""Picture and clip files, made in memory."""

import base64
import io
import pathlib
import struct
import tempfile
import zlib
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
    return with_matrix(mp4, cos, sin, -sin, cos)


# ---------------------------------------------------------------- pictures that Pillow cannot write

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png_chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_file(width, height, bits, colour, rows, *, interlaced=False, before=b"", animation=b""):
    """``rows`` with their filter bytes; ``before`` are chunks that go before the pixels."""
    head = png_chunk(b"IHDR", struct.pack(">2I5B", width, height, bits, colour, 0, 0, interlaced))
    end = png_chunk(b"IDAT", zlib.compress(rows)) + animation + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + before + end


def interlaced_png(pixels):
    """uint8 [H, W, 3] in the seven passes of Adam7."""
    rows = b""
    for x, y, dx, dy in ADAM7:
        part = pixels[y::dy, x::dx]
        rows += b"".join(b"\0" + row.tobytes() for row in part) if part.size else b""
    return png_file(pixels.shape[1], pixels.shape[0], 8, 2, rows, interlaced=True)


def tiff_file(width, height, bits, samples, data, *, photometric=2, kind=1):
    """One uncompressed strip, little-endian. ``kind`` 1 is unsigned, 3 float; ``data`` may be shorter."""
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, samples, bits),
        (259, 3, 1, 1),
        (262, 3, 1, photometric),
        (273, 4, 1, 0),
        (277, 3, 1, samples),
        (278, 4, 1, height),
        (279, 4, 1, len(data)),
        (339, 3, samples, kind),
    ]
    after = 8 + 2 + 12 * len(tags) + 4
    extra, entries = b"", b""
    for tag, form, count, value in tags:
        if tag == 273:
            value = after + 4 * samples * (samples > 2)
        if form == 3 and count > 2:
            entries += struct.pack("<2H2I", tag, form, count, after + len(extra))
            extra += struct.pack("<H", value) * count
        else:
            low = value | value << 16 if form == 3 and count == 2 else value
            entries += struct.pack("<2H2I", tag, form, count, low)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + extra + data


def without_segment(jpeg, marker):
    """A JPEG less its first segment of this kind."""
    at = jpeg.index(b"\xff" + bytes([marker]))
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]


# 16 x 16, red above blue, entropy-coded arithmetically (ITU T.81 F.1.4), which Pillow does not write.
ARITHMETIC_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAIBAQEBAQIBAQECAgICAgQDAgICAgUEBAMEBgUGBgYFBgYGBwkIBgcJBwYGCAsICQoK"
    "CgoKBggLDAsKDAkKCgr/2wBDAQICAgICAgUDAwUKBwYHCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoK"
    "CgoKCgoKCgoKCgr/yQARCAAQABADASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AOf5vpwMrVNfapJYuiq3AST+"
    "eriqdm80QVj/2Q=="
)


# ---------------------------------------------------------------- clips in motion


def scene(i, size=(64, 96)):
    """Frame i of a textured ground that moves under a blinking patch: uint8 [H, W, 3], none like another."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    ground = np.asarray(Image.fromarray(noise).resize((size[1] * 3, size[0] * 3), Image.Resampling.BICUBIC))
    x, y = i * 3 % (size[1] * 2), i * 2 % (size[0] * 2)
    frame = ground[y : y + size[0], x : x + size[1]].copy()
    frame[:8, :8] = i * 40 % 256
    return frame


def moving_clip(
    frames,
    *,
    kind="mp4",
    codec="libx264",
    rate=10,
    times=None,
    pix_fmt="yuv420p",
    options=None,
    container=None,
    colours=None,
    aspect=None,
):
    """``frames`` uint8 [H, W, 3] or [H, W, 4] of one size. ``colours`` are (colorspace, color_range)."""
    file = io.BytesIO()
    clock = Fraction(1, 1000) if times else Fraction(1, rate)
    with av.open(file, "w", format=kind, options=container or {}) as output:
        stream = output.add_stream(codec, rate=rate, options=options or {})
        context = stream.codec_context
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        context.time_base = clock
        into = {"format": pix_fmt}
        if colours:
            context.colorspace, context.color_range = colours
            into |= {"dst_colorspace": colours[0], "dst_color_range": colours[1]}
        if aspect:
            context.sample_aspect_ratio = aspect
        for i, pixels in enumerate(frames):
            form = "rgba" if pixels.shape[2] == 4 else "rgb24"
            frame = av.VideoFrame.from_ndarray(pixels, format=form).reformat(**into)
            frame.pts, frame.time_base = (round(times[i] * 1000) if times else i), clock
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def with_matrix(mp4, a, b, c, d):
    """An mp4 whose display matrix maps (x, y) to (ax + cy, bx + dy)."""
    at = mp4.index(b"tkhd") + 4 + 40
    matrix = [a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 0x40000000]
    return mp4[:at] + struct.pack(">9i", *matrix) + mp4[at + 36 :]


def with_edit(mp4, start, length):
    """An mp4 whose edit list shows ``length`` seconds from ``start`` seconds into its media.

    The clocks are read from its mvhd and mdhd boxes (version 0), the edit is written over its first one.
    """
    movie, media = (
        int.from_bytes(mp4[at + 16 : at + 20], "big") for at in map(mp4.index, (b"mvhd", b"mdhd"))
    )
    at = mp4.index(b"elst") + 12
    first = int.from_bytes(mp4[at + 4 : at + 8], "big")
    edit = struct.pack(">2I", round(length * movie), first + round(start * media))
    return mp4[:at] + edit + mp4[at + 8 :]


def cover_file():
    """A file whose only video stream is a cover picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuvj420p"
        stream.disposition = av.stream.Disposition.attached_pic
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
        container.mux(stream.encode())
    return file.getvalue()


def two_streams(first, second):
    """A Matroska file with two video streams, each of frames uint8 [H, W, 3]."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        for frames in (first, second):
            stream = container.add_stream("libx264", rate=10)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "yuv420p"
        for stream, frames in zip(container.streams.video, (first, second), strict=True):
            for pixels in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
            container.mux(stream.encode())
    return file.getvalue()


def animation_file(frames, kind, milliseconds=100, **options):
    """``frames`` are PIL pictures; ``milliseconds`` one time or a list."""
    how = {"lossless": True} if kind == "WEBP" else {"disposal": 2} if kind == "GIF" else {}
    how |= {"save_all": True, "append_images": frames[1:], "duration": milliseconds}
    return picture_file(frames[0], kind, **how, **options)
