"""Grounds: plain or gently patterned fields that still bear one colour name."""

import cv2
import numpy as np

from mmserve.models.tiny.palette import draw_colour


def draw_ground(rng: np.random.Generator, colour: str, height: int, width: int) -> np.ndarray:
    """A uint8 RGB field [height, width, 3] whose every pixel is some tint of the colour."""
    base = draw_colour(rng, colour)
    depth = rng.uniform(0.02, 0.05) if colour == "white" else rng.uniform(0.03, 0.09)
    pattern = _PATTERNS[rng.integers(len(_PATTERNS))](rng, height, width) * depth
    if base.max() > 200:
        pattern = pattern - depth
    field = base * (1 + pattern[..., None]) + pattern[..., None] * 12
    return np.clip(field, 0, 255).astype(np.uint8)


def axes(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column coordinates as broadcastable float32 arrays [h, 1] and [1, w]."""
    return np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)[None]


def soft_noise(rng: np.random.Generator, height: int, width: int, cell: float) -> np.ndarray:
    """Smooth noise [height, width] in about -1..1 with features of ``cell`` pixels."""
    rows, columns = max(2, int(height / cell) + 1), max(2, int(width / cell) + 1)
    coarse = rng.uniform(-1, 1, (rows, columns)).astype(np.float32)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def _solid(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return np.zeros((height, width), np.float32)


def _gradient(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = axes(height, width)
    angle = rng.uniform(0, 2 * np.pi)
    return np.cos(angle) * (2 * x / width - 1) + np.sin(angle) * (2 * y / height - 1)


def _stripes(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = axes(height, width)
    angle, period = rng.choice([0, np.pi / 2, np.pi / 4]), rng.uniform(8, 28)
    wave = np.sin((np.cos(angle) * x + np.sin(angle) * y) * (2 * np.pi / period))
    return np.clip(wave * 3, -1, 1) + np.zeros((height, width), np.float32)


def _checks(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = axes(height, width)
    period = rng.uniform(8, 24)
    return (((y // period) + (x // period)) % 2) * 2 - 1


def _speckle(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.uniform(-1, 1, (height, width)).astype(np.float32)


def _paper(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return soft_noise(rng, height, width, 20) * 0.6 + soft_noise(rng, height, width, 4) * 0.4


_PATTERNS = (_solid, _solid, _gradient, _gradient, _stripes, _checks, _speckle, _paper)
