"""Damaged media files, and a long hunt: ``PYTHONPATH=tests python -m helpers.fuzz --seconds 600``.

The hunt runs in a child process with bounded memory. The child names each trial before it begins, so that
one that kills it, or that takes too long, is known by its number and can be made again.
"""

import argparse
import faulthandler
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path

import numpy as np
from helpers.media_files import (
    animation_file,
    interlaced_png,
    moving_clip,
    picture_file,
    scene,
    tiff_file,
)
from helpers.tiny_folder import write_folder
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import VideoPart
from mmserve.preprocess.heif import load_heif
from mmserve.preprocess.image import decode_image
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.video import read_video

SLOW_S = 10.0
HANGS_S = 60.0
MEMORY = 3 << 30
WORTH_TRYING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


@cache
def pictures() -> dict[str, bytes]:
    load_heif()
    image = Image.fromarray(scene(1, (40, 56)))
    profile = {"icc_profile": b"x" * 200, "exif": Image.Exif().tobytes()}
    return {
        "jpeg": picture_file(image, "JPEG", **profile),
        "jpeg progressive": picture_file(image, "JPEG", progressive=True),
        "jpeg cmyk": picture_file(image.convert("CMYK"), "JPEG"),
        "png": picture_file(image.convert("RGBA"), "PNG"),
        "png palette": picture_file(image.convert("P"), "PNG", transparency=3),
        "png interlaced": interlaced_png(np.asarray(image)),
        "webp": picture_file(image, "WEBP"),
        "webp lossless": picture_file(image.convert("RGBA"), "WEBP", lossless=True),
        "gif": picture_file(image.convert("P"), "GIF"),
        "bmp": picture_file(image, "BMP"),
        "tiff": picture_file(image, "TIFF"),
        "tiff lzw": picture_file(image, "TIFF", compression="tiff_lzw"),
        "tiff jpeg": picture_file(image, "TIFF", compression="jpeg"),
        "tiff 16": tiff_file(8, 8, 16, 3, bytes(range(192)) * 2),
        "avif": picture_file(image, "AVIF"),
        "heif": picture_file(image.resize((64, 64)), "HEIF"),
        "ppm": picture_file(image, "PPM"),
    }


@cache
def clips() -> dict[str, bytes]:
    frames = [scene(i, (48, 64)) for i in range(12)]
    images = [Image.fromarray(f) for f in frames[:4]]
    h264 = {"g": "5", "bf": "2", "preset": "ultrafast"}
    return {
        "mp4": moving_clip(frames, options=h264),
        "mp4 fragments": moving_clip(
            frames, options=h264, container={"movflags": "frag_keyframe+empty_moov"}
        ),
        "matroska": moving_clip(frames, kind="matroska", options=h264),
        "mpegts": moving_clip(frames, kind="mpegts", options=h264),
        "h264": moving_clip(frames, kind="h264", options=h264),
        "hevc": moving_clip(frames, codec="libx265", options={"x265-params": "log-level=none:keyint=5"}),
        "vp8": moving_clip(frames, kind="webm", codec="libvpx", options={"g": "5"}),
        "vp9": moving_clip(frames, kind="webm", codec="libvpx-vp9", options={"g": "5"}),
        "av1": moving_clip(frames, codec="libsvtav1", options={"g": "5", "preset": "12"}),
        "avi": moving_clip(frames, kind="avi", codec="mpeg4", options={"g": "5"}),
        "mjpeg": moving_clip(frames, kind="avi", codec="mjpeg", pix_fmt="yuvj420p"),
        "mpeg2": moving_clip(frames, kind="mpeg", codec="mpeg2video", rate=25, options={"g": "5", "bf": "2"}),
        "asf": moving_clip(frames, kind="asf", codec="wmv2"),
        "flv": moving_clip(frames, kind="flv", codec="flv1"),
        "prores": moving_clip(frames[:3], kind="mov", codec="prores_ks", pix_fmt="yuv422p10le"),
        **{kind: animation_file(images, kind) for kind in ("GIF", "PNG", "WEBP", "AVIF")},
    }


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to eight changes: bytes, bits, whole numbers, pieces moved, doubled or dropped, an end cut off."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at = draw.randrange(len(out)) if draw.random() < 0.6 else draw.randrange(min(len(out), 256))
        piece = draw.choice((1, 4, 16, 200))
        match draw.randrange(7):
            case 0:
                out[at] = draw.randrange(256)
            case 1:
                out[at] ^= 1 << draw.randrange(8)
            case 2:
                size = draw.choice((1, 2, 4))
                value = draw.choice(WORTH_TRYING) & (1 << 8 * size) - 1
                out[at : at + size] = value.to_bytes(size, draw.choice(("big", "little")))
            case 3:
                del out[at : at + piece]
            case 4:
                out[at:at] = out[at : at + piece]
            case 5:
                to = draw.randrange(len(out))
                out[to:to] = out[at : at + piece]
            case 6 if draw.random() < 0.3:
                del out[max(at, 1) :]
        if not out:
            return b"\0"
    return bytes(out)


def try_picture(data: bytes, options: MediaOptions) -> None:
    try:
        decode_image(data, options)
    except MediaError:
        return


def try_clip(data: bytes, spec: ProcessorSpec, options: MediaOptions, draw: random.Random) -> None:
    how = draw.choice(({"num_frames": 3}, {"fps": 2.0}, {"fps": 10.0}))
    try:
        read_video(VideoPart(data=data, **how), spec, options)
    except MediaError:
        return


# ---------------------------------------------------------------- the hunt


def trial(number: int, kinds: str, spec: ProcessorSpec, options: MediaOptions) -> str:
    """Run one trial, the same each time for its number. Returns the name of the file that was damaged."""
    draw = random.Random(number)
    files = {"pictures": pictures, "clips": clips}[kinds]()
    name = sorted(files)[number % len(files)]
    data = mutated(files[name], draw)
    if kinds == "pictures":
        try_picture(data, options)
    else:
        try_clip(data, spec, options, draw)
    return name


def hunt(kinds: str, start: int, until: float, folder: Path) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    spec = ProcessorSpec.load(write_folder(folder / "model"))
    options = MediaOptions(max_image_pixels=4_000_000, max_animation_pixels=40_000_000)
    number = start
    while time.time() < until:
        (folder / "trial").write_text(str(number))
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        begun = time.perf_counter()
        try:
            name = trial(number, kinds, spec, options)
        except Exception as error:
            print(f"{kinds} {number}: {type(error).__name__}: {error}", flush=True)
            name = ""
        took = time.perf_counter() - begun
        if took > SLOW_S:
            print(f"{kinds} {number} ({name}) took {took:.0f} s", flush=True)
        number += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{kinds}: trials {start} to {number - 1}, peak {peak} MiB", flush=True)


def supervise(kinds: str, seconds: float, start: int) -> None:
    """Start the hunt again behind every trial that killed it."""
    until = time.time() + seconds
    with tempfile.TemporaryDirectory() as name:
        while time.time() < until:
            child = [sys.executable, "-m", "helpers.fuzz", "--child", kinds, str(start), str(until), name]
            done = subprocess.run(child, check=False, stderr=subprocess.DEVNULL)
            if done.returncode == 0:
                return
            start = int((Path(name) / "trial").read_text())
            print(f"{kinds} {start}: ended the process ({done.returncode})", flush=True)
            start += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", choices=("pictures", "clips"), default="clips")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kinds, start, until, folder = args.child
        hunt(kinds, int(start), float(until), Path(folder))
    else:
        supervise(args.kinds, args.seconds, args.start)


if __name__ == "__main__":
    main()
