"""Ready-made pixels: glyphs, shapes and printed words as square or wide masks, drawn once and kept.

A sprite is a pyramid of premultiplied RGBA uint8 arrays, largest first, each half the size of the one
before; the drawing picks the level just above the wanted size, so that it never aliases.
"""

import os
from functools import cache, lru_cache
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmserve.models.tiny.palette import NAMES, to_lab, typical
from mmserve.models.tiny.subjects import STRANGER_GLYPHS, things

SIDE = 128
GLYPH_FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
WORD_FONT_SIZE = 64
_WORD_FONTS = (
    "dejavu/DejaVuSans-Bold.ttf",
    "dejavu/DejaVuSans.ttf",
    "dejavu/DejaVuSerif-Bold.ttf",
    "dejavu/DejaVuSansMono-Bold.ttf",
    "dejavu/DejaVuSansCondensed-Bold.ttf",
    "liberation/LiberationSans-Bold.ttf",
    "liberation/LiberationSerif-Bold.ttf",
    "liberation/LiberationSansNarrow-Bold.ttf",
)
Pyramid = tuple[np.ndarray, ...]


def work_dir() -> Path:
    """Where drawn sprites and photograph crops are kept between runs."""
    path = Path(os.environ.get("MMSERVE_TINY_WORK") or Path.home() / ".cache" / "mmserve" / "tiny")
    path.mkdir(parents=True, exist_ok=True)
    return path


def pyramid(image: np.ndarray) -> Pyramid:
    """The image and its halves down to 16 pixels."""
    levels = [image]
    while min(levels[-1].shape[:2]) >= 32:
        height, width = levels[-1].shape[:2]
        levels.append(cv2.resize(levels[-1], (width // 2, height // 2), interpolation=cv2.INTER_AREA))
    return tuple(levels)


@cache
def word_fonts() -> tuple[str, ...]:
    """The installed fonts that words are printed in."""
    root = Path("/usr/share/fonts/truetype")
    found = tuple(str(root / name) for name in _WORD_FONTS if (root / name).is_file())
    if not found:
        raise FileNotFoundError("no font for printed words; install fonts-dejavu-core")
    return found


@lru_cache(maxsize=4096)
def word_mask(text: str, font: str) -> tuple[Pyramid, float]:
    """The printed text as a pyramid of masks, and its capitals' height in pixels of the largest."""
    face = _face(font)
    left, top, right, bottom = face.getbbox(text)
    sheet = Image.new("L", (int(right - left) + 8, int(bottom - top) + 8))
    ImageDraw.Draw(sheet).text((4 - left, 4 - top), text, fill=255, font=face)
    _, cap_top, _, cap_bottom = face.getbbox("H")
    return pyramid(np.asarray(sheet)), float(cap_bottom - cap_top)


@lru_cache(maxsize=4096)
def letter_edges(text: str, font: str) -> tuple[float, ...]:
    """Where each letter begins, and the last one ends, in columns of ``word_mask``'s largest level."""
    face = _face(font)
    left = face.getbbox(text)[0]
    return tuple(4 - left + face.getlength(text[:i]) for i in range(len(text) + 1))


@cache
def _face(font: str) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font, WORD_FONT_SIZE)


@cache
def shape_mask(name: str) -> Pyramid:
    """The shape as a pyramid of uint8 coverage masks, filling its square."""
    big = np.zeros((SIDE * 4, SIDE * 4), np.uint8)
    centre, radius = SIDE * 2, SIDE * 2 - 8
    if name in ("circle", "ring", "crescent"):
        cv2.circle(big, (centre, centre), radius, 255, -1)
        if name == "ring":
            cv2.circle(big, (centre, centre), int(radius * 0.58), 0, -1)
        if name == "crescent":
            cv2.circle(big, (centre + int(radius * 0.55), centre), int(radius * 0.85), 0, -1)
    elif name == "oval":
        cv2.ellipse(big, (centre, centre), (radius, int(radius * 0.56)), 0, 0, 360, 255, -1)
    else:
        points = np.round(_outline(name) * radius + centre).astype(np.int32)
        cv2.fillPoly(big, [points], 255)
    return pyramid(centred(cv2.resize(big, (SIDE, SIDE), interpolation=cv2.INTER_AREA)))


def _outline(name: str) -> np.ndarray:
    """Corner points in [-1, 1], y down."""
    if name in ("triangle", "pentagon"):
        return _ngon({"triangle": 3, "pentagon": 5}[name])
    if name == "star":
        outer, inner = _ngon(5), _ngon(5, 36) * 0.42
        return np.stack([outer, inner], 1).reshape(-1, 2)
    if name == "heart":
        turn = np.linspace(0, 2 * np.pi, 80)
        x = 16 * np.sin(turn) ** 3
        y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        return np.stack([x, -y], 1) / 17
    fixed = {
        "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
        "diamond": [(0, -1), (0.68, 0), (0, 1), (-0.68, 0)],
        "cross": _ring_of_four([(-0.33, -1), (0.33, -1), (0.33, -0.33)]),
        "arrow": [(-1, -0.27), (0.1, -0.27), (0.1, -0.75), (1, 0), (0.1, 0.75), (0.1, 0.27), (-1, 0.27)],
    }
    return np.array(fixed[name], np.float64)


def _ring_of_four(quarter: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, and again turned by 90, 180 and 270 degrees."""
    turned = [quarter]
    for _ in range(3):
        turned.append([(-y, x) for x, y in turned[-1]])
    return [point for part in turned for point in part]


def _ngon(corners: int, turn: float = 0.0) -> np.ndarray:
    angle = np.radians(np.arange(corners) * 360 / corners - 90 + turn)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def centred(image: np.ndarray) -> np.ndarray:
    """The image cropped to its ink (mask or alpha) and centred in a SIDE x SIDE square that it fills."""
    ink = image if image.ndim == 2 else image[..., 3]
    rows, columns = np.flatnonzero(ink.max(1) > 8), np.flatnonzero(ink.max(0) > 8)
    cut = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = (SIDE - 4) / max(cut.shape[:2])
    size = (max(1, round(cut.shape[1] * scale)), max(1, round(cut.shape[0] * scale)))
    cut = cv2.resize(cut, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    out = np.zeros((SIDE, SIDE, *image.shape[2:]), np.uint8)
    top, left = (SIDE - size[1]) // 2, (SIDE - size[0]) // 2
    out[top : top + size[1], left : left + size[0]] = cut
    return out


def _render_glyph(face: ImageFont.FreeTypeFont, glyph: str) -> np.ndarray:
    sheet = Image.new("RGBA", (180, 180), (0, 0, 0, 0))
    ImageDraw.Draw(sheet).text((16, 16), glyph, font=face, embedded_color=True)
    rgba = np.asarray(sheet).copy()
    if not rgba[..., 3].any():
        raise ValueError(f"the font has no picture for {glyph!r}")
    rgba[..., :3] = (rgba[..., :3].astype(np.uint16) * rgba[..., 3:] // 255).astype(np.uint8)
    return centred(rgba)


@cache
def _glyph_sheet() -> dict[str, np.ndarray]:
    """Glyph -> premultiplied RGBA, from the work folder or, the first time, from the font."""
    glyphs = [glyph for glyph, _ in things().values()] + list(STRANGER_GLYPHS)
    store = work_dir() / "glyphs-2.npz"
    if store.is_file():
        with np.load(store) as kept:
            if "".join(glyphs) == str(kept["glyphs"]):
                return dict(zip(glyphs, kept["pixels"], strict=True))
    if not GLYPH_FONT.is_file():
        raise FileNotFoundError(f"{GLYPH_FONT} is missing; install fonts-noto-color-emoji")
    face = ImageFont.truetype(str(GLYPH_FONT), 109)
    pixels = np.stack([_render_glyph(face, glyph) for glyph in glyphs])
    draft = store.with_name(f"{store.stem}.{os.getpid()}.npz")
    np.savez_compressed(draft, glyphs="".join(glyphs), pixels=pixels)
    draft.replace(store)
    return dict(zip(glyphs, pixels, strict=True))


@cache
def glyph_sprite(glyph: str) -> Pyramid:
    """The glyph as a pyramid of premultiplied RGBA."""
    return pyramid(_glyph_sheet()[glyph])


@cache
def visible_grounds(name: str) -> tuple[str, ...]:
    """The ground colours on which the named thing stands out."""
    rgba = glyph_sprite(things()[name][0])[2].reshape(-1, 4)
    solid = rgba[rgba[:, 3] > 200][:, :3]
    lab = to_lab(solid)
    seen = {ground: np.linalg.norm(lab - to_lab(typical(ground)), axis=1) > 28 for ground in NAMES}
    return tuple(ground for ground in NAMES if seen[ground].mean() >= 0.6)
