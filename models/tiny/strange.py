"""Pictures from outside the world: noise, textures, faces, photographs; only their colours are told."""

import logging
from functools import cache

import cv2
import numpy as np

from mmserve.models.tiny.draw import stamp
from mmserve.models.tiny.grounds import axes, draw_ground, soft_noise
from mmserve.models.tiny.palette import NAMES, draw_colour
from mmserve.models.tiny.sprites import SIDE, glyph_sprite, pyramid, work_dir
from mmserve.models.tiny.subjects import STRANGER_GLYPHS


def draw_strange(rng: np.random.Generator, height: int, width: int, family: str | None = None) -> np.ndarray:
    """A uint8 RGB picture of one family of FAMILIES, or of a random one."""
    if family is None:
        family = _ORDER[int(rng.choice(len(_ORDER), p=_CHANCES))]
    return np.clip(FAMILIES[family](rng, height, width), 0, 255).astype(np.uint8)


def any_colour(rng: np.random.Generator) -> np.ndarray:
    """A float32 RGB value: half of them named colours, half anything."""
    if rng.random() < 0.5:
        return draw_colour(rng, NAMES[int(rng.integers(len(NAMES)))])
    return rng.uniform(0, 255, 3).astype(np.float32)


def _ramp(rng: np.random.Generator, field: np.ndarray) -> np.ndarray:
    """Colour a field in about -1..1 by two or three colours."""
    stops = np.stack([any_colour(rng) for _ in range(int(rng.integers(2, 4)))])
    level = np.clip((field + 1) / 2, 0, 1) * (len(stops) - 1)
    low = np.minimum(level.astype(np.int32), len(stops) - 2)
    part = (level - low)[..., None]
    return stops[low] * (1 - part) + stops[low + 1] * part


def _fractal(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    cells = [64, 32, 16, 8, 4][int(rng.integers(0, 3)) :]
    decay = rng.uniform(0.4, 0.8)
    field = sum(soft_noise(rng, height, width, cell) * decay**i for i, cell in enumerate(cells))
    return _ramp(rng, np.asarray(field) * rng.uniform(0.6, 1.4))


def _static(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    channels = 3 if rng.random() < 0.5 else 1
    field = rng.uniform(0, 255, (height, width, channels)).astype(np.float32)
    return field * rng.uniform(0.3, 1.0) + np.zeros(3, np.float32)


def _flat(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    level = rng.uniform(0, 25) if rng.random() < 0.5 else rng.uniform(0, 255)
    base = np.full(3, level, np.float32) if rng.random() < 0.7 else any_colour(rng)
    return base + rng.standard_normal((height, width, 1), np.float32) * rng.uniform(0, 8)


def _empty_ground(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return draw_ground(rng, NAMES[int(rng.integers(len(NAMES)))], height, width)


def _blobs(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.float32) + any_colour(rng)
    for _ in range(int(rng.integers(5, 14))):
        centre = (int(rng.integers(width)), int(rng.integers(height)))
        reach = (int(rng.integers(width // 12, width // 3)), int(rng.integers(height // 12, height // 3)))
        cv2.ellipse(picture, centre, reach, float(rng.uniform(0, 180)), 0, 360, any_colour(rng).tolist(), -1)
    return cv2.GaussianBlur(picture, (0, 0), float(rng.uniform(0.04, 0.12) * min(height, width)))


def _voronoi(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    count = int(rng.integers(6, 40))
    y, x = axes(height, width)
    points = rng.uniform(0, 1, (count, 2)).astype(np.float32) * (height, width)
    gap = np.stack([(y - p) ** 2 + (x - q) ** 2 for p, q in points])
    palette = np.stack([any_colour(rng) for _ in range(int(rng.integers(3, 7)))])
    return palette[rng.integers(len(palette), size=count)][gap.argmin(0)]


def _mosaic(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.float32) + any_colour(rng)
    for _ in range(int(rng.integers(10, 30))):
        middle = rng.uniform(0, 1, 2) * (width, height)
        spread = rng.uniform(0.15, 0.5) * min(height, width)
        points = (middle + rng.uniform(-spread, spread, (int(rng.integers(3, 6)), 2))).astype(np.int32)
        cv2.fillPoly(picture, [points], any_colour(rng).tolist(), cv2.LINE_AA)
    return picture


def _scribble(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.float32) + any_colour(rng)
    for _ in range(int(rng.integers(3, 16))):
        points = rng.uniform(-0.1, 1.1, (int(rng.integers(2, 12)), 2)) * (width, height)
        thick = int(rng.integers(1, 1 + min(height, width) // 20))
        cv2.polylines(picture, [points.astype(np.int32)], False, any_colour(rng).tolist(), thick, cv2.LINE_AA)
    return picture


def _grain(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Wood, stone or cloth: stretched noise, rings or a weave."""
    y, x = axes(height, width)
    warp = soft_noise(rng, height, width, 40) * rng.uniform(1, 8)
    kind = int(rng.integers(3))
    if kind == 0:
        rows = cv2.resize(soft_noise(rng, height, 6, 2), (width, height))
        field = rows * 0.6 + np.sin((y + warp * 3) * rng.uniform(0.1, 0.6)) * 0.4
    elif kind == 1:
        field = np.abs(soft_noise(rng, height, width, 24) + soft_noise(rng, height, width, 6) * 0.5) * 2 - 1
    else:
        period = rng.uniform(3, 9)
        field = np.sin((x + warp) * (6.28 / period)) * np.sin((y + warp) * (6.28 / period))
    return _ramp(rng, field)


def _landscape(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A gradient of sky over ranges of hills."""
    y, _ = axes(height, width)
    part = (y / height)[..., None]
    sky = draw_colour(rng, ("blue", "white", "grey", "orange", "pink")[int(rng.integers(5))])
    picture = sky * (1 - part) + (sky * 0.5 + 120) * part + np.zeros((height, width, 1), np.float32)
    horizon = rng.uniform(0.3, 0.6)
    for _ in range(int(rng.integers(1, 5))):
        ridge = horizon * height + soft_noise(rng, 2, width, rng.uniform(10, 60))[0] * height * 0.12
        land = draw_colour(rng, ("green", "brown", "grey", "blue", "black")[int(rng.integers(5))])
        shade = 1 + soft_noise(rng, height, width, 6)[..., None] * 0.25
        picture = np.where((y > ridge)[..., None], land * shade, picture)
        horizon += rng.uniform(0.08, 0.25)
    return picture


def _face(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Something like a face: skin, hair, eyes and a mouth, softened."""
    picture = _ramp(rng, soft_noise(rng, height, width, 50))
    short = min(height, width)
    x, y = (rng.uniform(0.4, 0.6, 2) * (width, height)).astype(int).tolist()
    reach = int(rng.uniform(0.22, 0.42) * short)
    skin = np.array([[236, 196, 172], [205, 150, 118], [150, 100, 70], [92, 60, 42]])[int(rng.integers(4))]
    hair = np.array([[40, 28, 22], [90, 60, 35], [190, 150, 90], [120, 120, 120]])[int(rng.integers(4))]
    tall = int(reach * 1.3)
    cv2.ellipse(picture, (x, y - reach // 4), (int(reach * 1.15), tall), 0, 0, 360, hair.tolist(), -1)
    cv2.rectangle(picture, (x - reach // 2, y), (x + reach // 2, height), (skin * 0.9).tolist(), -1)
    cv2.ellipse(picture, (x, y + reach // 8), (reach, int(reach * 1.2)), 0, 0, 360, skin.tolist(), -1)
    for side in (-1, 1):
        spot = (x + side * int(reach * 0.4), y - reach // 8)
        cv2.ellipse(picture, spot, (max(2, reach // 6), max(1, reach // 11)), 0, 0, 360, (240, 240, 238), -1)
        cv2.circle(picture, spot, max(1, reach // 12), (40, 30, 25), -1)
    mouth = (x, y + int(reach * 0.6))
    cv2.ellipse(picture, mouth, (int(reach * 0.35), max(1, reach // 9)), 0, 0, 360, (165, 70, 70), -1)
    picture = cv2.GaussianBlur(picture, (0, 0), max(0.5, short * float(rng.uniform(0.005, 0.02))))
    return picture * (1 + soft_noise(rng, height, width, 40)[..., None] * 0.2)


def _stranger(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A glyph whose name was never taught."""
    picture = draw_ground(rng, NAMES[int(rng.integers(len(NAMES)))], height, width)
    levels = glyph_sprite(STRANGER_GLYPHS[int(rng.integers(len(STRANGER_GLYPHS)))])
    size = rng.uniform(0.4, 0.85) * min(height, width)
    x, y = rng.uniform(0.4, 0.6, 2) * (width, height)
    stamp(picture, levels, x, y, size / levels[0].shape[0], float(rng.uniform(-20, 20)), None)
    return picture


def _photograph(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A crop of a free wallpaper photograph, turned, flipped and tinted; fractal noise without any."""
    shelf = photographs()
    if not len(shelf):
        return _fractal(rng, height, width)
    photo = shelf[int(rng.integers(len(shelf)))]
    side = photo.shape[0]
    part = rng.uniform(0.35, 1.0)
    tall, wide = int(side * part * min(1, height / width)), int(side * part * min(1, width / height))
    top, left = int(rng.integers(side - tall + 1)), int(rng.integers(side - wide + 1))
    cut = cv2.resize(
        photo[top : top + tall, left : left + wide], (width, height), interpolation=cv2.INTER_AREA
    )
    if rng.random() < 0.5:
        cut = cut[:, ::-1]
    cut = cut.astype(np.float32)
    if rng.random() < 0.3:
        cut = cut[..., rng.permutation(3)]
    return (cut - 128) * rng.uniform(0.7, 1.3) + 128 * rng.uniform(0.6, 1.3)


def _collage(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Cut-out photographs of real things before a photograph or a texture."""
    shelf = _shelf("cutouts", (SIDE, SIDE, 4))
    behind = (_photograph, _photograph, _grain, _landscape, _fractal)[int(rng.integers(5))]
    picture = np.clip(behind(rng, height, width), 0, 255).astype(np.uint8)
    for _ in range(int(rng.integers(1, 4)) if len(shelf) else 0):
        cutout = np.ascontiguousarray(shelf[int(rng.integers(len(shelf)))])
        if rng.random() < 0.5:
            cutout = np.ascontiguousarray(cutout[:, ::-1])
        x, y = rng.uniform(0.25, 0.75, 2) * (width, height)
        size = rng.uniform(0.4, 1.2) * min(height, width)
        stamp(picture, pyramid(cutout), x, y, size / SIDE, float(rng.uniform(-10, 10)), None)
    return picture


def photographs() -> np.ndarray:
    """uint8 [N, 192, 192, 3] crops for training, gathered by ``photos.py``; empty when there are none."""
    return _shelf("photographs", (192, 192, 3))


@cache
def _shelf(name: str, shape: tuple[int, ...]) -> np.ndarray:
    store = work_dir() / f"{name}.npy"
    if store.is_file():
        return np.load(store, mmap_mode="r")
    logging.getLogger(__name__).warning("no %s for training: run mmserve.models.tiny.photos", name)
    return np.zeros((0, *shape), np.uint8)


FAMILIES = {
    "photograph": _photograph,
    "collage": _collage,
    "fractal": _fractal,
    "static": _static,
    "flat": _flat,
    "empty": _empty_ground,
    "blobs": _blobs,
    "voronoi": _voronoi,
    "mosaic": _mosaic,
    "scribble": _scribble,
    "grain": _grain,
    "landscape": _landscape,
    "face": _face,
    "stranger": _stranger,
}
_ORDER = tuple(FAMILIES)
_WEIGHTS = np.array([34, 18, 8, 3, 6, 3, 5, 5, 5, 5, 7, 6, 7, 5], np.float64)
_CHANCES = _WEIGHTS / _WEIGHTS.sum()
