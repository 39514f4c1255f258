"""Colour as numbers: drawing a named colour, and naming the colours of a picture."""

import colorsys
from collections.abc import Sequence
from functools import cache

import cv2
import numpy as np

from mmserve.models.tiny.subjects import COLOURS

NAMES = tuple(COLOURS)

# Prototypes (hue, saturation, value) for naming the colours of any picture; wider than COLOURS.
_PROTOTYPES: dict[str, Sequence[tuple[float, float, float]]] = {
    "red": [(0, s, v) for s in (0.7, 0.9) for v in (0.5, 0.7, 0.9)] + [(8, 0.85, 0.8), (352, 0.8, 0.7)],
    "orange": [(28, 0.9, 0.95), (24, 0.75, 0.9), (34, 0.7, 0.95), (30, 0.5, 0.95)],
    "yellow": [(54, s, v) for s in (0.5, 0.75, 1.0) for v in (0.8, 1.0)],
    "green": [(h, s, v) for h in (75, 100, 130, 160) for s in (0.4, 0.8) for v in (0.25, 0.45, 0.7, 0.9)],
    "blue": [(h, s, v) for h in (190, 210, 230) for s in (0.3, 0.55, 0.9) for v in (0.35, 0.6, 0.9)],
    "purple": [(h, s, v) for h in (265, 285, 300) for s in (0.4, 0.75) for v in (0.35, 0.6, 0.85)],
    "pink": [(h, s, v) for h in (320, 340, 352) for s in (0.25, 0.45) for v in (0.85, 1.0)]
    + [(325, 0.8, 0.95)],
    "brown": [(h, s, v) for h in (20, 32) for s in (0.4, 0.65) for v in (0.25, 0.4, 0.58)],
    "black": [(0, 0.0, v) for v in (0.0, 0.08, 0.15, 0.2)]
    + [(h, 0.45, 0.12) for h in (0, 30, 120, 220, 280)],
    "grey": [(0, 0.0, v) for v in (0.3, 0.45, 0.6, 0.75)]
    + [(h, 0.12, v) for h in (30, 120, 210, 280) for v in (0.35, 0.5, 0.7)],
    "white": [(0, 0.0, v) for v in (0.9, 1.0)] + [(h, 0.06, 0.97) for h in (40, 210)],
}


def draw_colour(rng: np.random.Generator, name: str) -> np.ndarray:
    """A float32 RGB value in 0..255 that bears the name."""
    hue, saturation, value = (rng.uniform(*bounds) for bounds in COLOURS[name])
    return np.array(colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value), np.float32) * 255


@cache
def typical(name: str) -> np.ndarray:
    """The middle of a name's range, float32 RGB in 0..255."""
    hue, saturation, value = (sum(bounds) / 2 for bounds in COLOURS[name])
    return np.array(colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value), np.float32) * 255


def to_lab(rgb: np.ndarray) -> np.ndarray:
    """CIE Lab of RGB values in 0..255, any leading shape."""
    flat = np.asarray(rgb, np.float32).reshape(-1, 1, 3) / 255
    return cv2.cvtColor(flat, cv2.COLOR_RGB2LAB).reshape(np.shape(rgb))


@cache
def contrasting(name: str) -> tuple[str, ...]:
    """The colour names that stand out clearly on a ground of this name."""
    here = to_lab(typical(name))
    return tuple(other for other in NAMES if np.linalg.norm(to_lab(typical(other)) - here) > 38)


@cache
def legible(name: str) -> tuple[str, ...]:
    """The contrasting colours that also differ in lightness, as the ink of a word must."""
    light = to_lab(typical(name))[0]
    return tuple(other for other in contrasting(name) if abs(to_lab(typical(other))[0] - light) > 20)


@cache
def _shares_by_rgb() -> np.ndarray:
    """[32768, names]: for each RGB value of 5 bits a channel, how much of each name it is."""
    steps = np.arange(32, dtype=np.float32) * 8 + 4
    grid = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1).reshape(-1, 3)
    lab = to_lab(grid)
    columns = []
    for name in NAMES:
        rgb = np.array([colorsys.hsv_to_rgb(h / 360, s, v) for h, s, v in _PROTOTYPES[name]], np.float32)
        gap = lab[:, None] - to_lab(rgb * 255)[None]
        columns.append((gap**2).sum(-1).min(1))
    weight = np.exp(-(np.stack(columns, 1) - np.min(columns, 0)[:, None]) / 60)
    return weight / weight.sum(1, keepdims=True)


def colour_shares(picture: np.ndarray) -> dict[str, float]:
    """How much of a uint8 RGB picture each colour name covers; the shares add up to 1."""
    small = cv2.resize(picture, (32, 32), interpolation=cv2.INTER_AREA).reshape(-1, 3).astype(np.int32) >> 3
    index = (small[:, 0] << 10) | (small[:, 1] << 5) | small[:, 2]
    return dict(zip(NAMES, _shares_by_rgb()[index].mean(0).tolist(), strict=True))


def main_colours(picture: np.ndarray) -> tuple[list[str], list[str]]:
    """The one or two main colour names by area, and every name that would be a fair answer."""
    shares = colour_shares(picture)
    order = sorted(shares, key=lambda name: -shares[name])
    main = order[:2] if shares[order[1]] >= 0.22 else order[:1]
    fair = [name for name in order if shares[name] >= 0.10 or name in main]
    return main, fair
