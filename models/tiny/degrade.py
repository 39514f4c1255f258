"""What happens to a picture between the wall and the file: light, lens, angle, sensor and JPEG."""

from dataclasses import dataclass

import cv2
import numpy as np

from mmserve.models.tiny.grounds import axes, soft_noise


@dataclass(frozen=True, slots=True)
class Recipe:
    """One camera's faults, the same for every frame of a clip. ``None`` or 0 leaves a step out."""

    warp: np.ndarray | None
    surround: np.ndarray | None
    tone: np.ndarray | None
    light: np.ndarray | None
    blur: float
    noise: float
    quality: int


def degrade(rng: np.random.Generator, picture: np.ndarray, strength: float) -> np.ndarray:
    """The uint8 RGB picture as photographed; strength 0 returns it clean, 1 is bad."""
    if strength <= 0:
        return picture
    return shoot(rng, picture, plan(rng, picture.shape[0], picture.shape[1], strength))


def plan(rng: np.random.Generator, height: int, width: int, strength: float, every: bool = False) -> Recipe:
    """Draw a camera's faults; ``every`` forces all of them at once (the evaluation's bad condition)."""

    def hit(chance: float) -> bool:
        return every or rng.random() < chance

    tilted = hit(0.45)
    return Recipe(
        warp=_tilt(rng, height, width, strength) if tilted else None,
        surround=_surround(rng, height, width) if tilted else None,
        tone=_tone(rng, strength) if hit(0.6) else None,
        light=_light(rng, height, width, strength) if hit(0.45) else None,
        blur=strength * rng.uniform(0.3, 1.0) * min(height, width) * 0.008 if hit(0.5) else 0.0,
        noise=strength * rng.uniform(3, 14) if hit(0.5) else 0.0,
        quality=int(95 - 68 * strength * rng.uniform(0.3, 1.0)) if hit(0.6) else 0,
    )


def shoot(rng: np.random.Generator, picture: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Apply the faults to one uint8 RGB frame."""
    height, width = picture.shape[:2]
    if recipe.warp is not None and recipe.surround is not None:
        frame = recipe.surround.copy()
        border = cv2.BORDER_TRANSPARENT
        picture = cv2.warpPerspective(picture, recipe.warp, (width, height), frame, cv2.INTER_LINEAR, border)
    if recipe.blur > 0.25:
        picture = cv2.GaussianBlur(picture, (0, 0), recipe.blur)
    if recipe.tone is not None:
        picture = cv2.LUT(picture, recipe.tone)
    if recipe.light is not None or recipe.noise:
        field = picture.astype(np.float32)
        if recipe.light is not None:
            field *= recipe.light
        if recipe.noise:
            field += rng.standard_normal(field.shape, np.float32) * recipe.noise
        picture = np.clip(field, 0, 255).astype(np.uint8)
    return jpeg(picture, recipe.quality) if recipe.quality else picture


def jpeg(picture: np.ndarray, quality: int) -> np.ndarray:
    """The picture after a round trip through JPEG."""
    _, data = cv2.imencode(".jpg", picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    decoded = cv2.imdecode(data, cv2.IMREAD_COLOR)
    assert decoded is not None
    return decoded[..., ::-1].copy()


def _tilt(rng: np.random.Generator, height: int, width: int, strength: float) -> np.ndarray:
    """A homography that turns the picture a little and pulls its corners inwards."""
    size = np.array([width, height], np.float32)
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)], np.float32)
    inset = rng.uniform(-0.01, 0.02 + 0.08 * strength, (4, 2)).astype(np.float32)
    target = corners + inset * (1 - 2 * corners)
    angle = np.radians(rng.uniform(-6, 6) * strength)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]], np.float32)
    middle = size / 2
    placed = (target * size - middle) @ turn.T + middle
    return cv2.getPerspectiveTransform(corners * size, placed.astype(np.float32))


def _surround(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A table or a wall: grey, cream, dark or wood."""
    bases = [(120, 118, 115), (200, 192, 178), (60, 58, 56), (150, 110, 72), (112, 78, 50), (225, 222, 216)]
    base = np.array(bases[rng.integers(len(bases))], np.float32) * rng.uniform(0.85, 1.1)
    grain = soft_noise(rng, height, width, 24) * 0.08
    if rng.random() < 0.5:
        grain = grain + cv2.resize(soft_noise(rng, height, 4, 3), (width, height)) * 0.08
    return np.clip(base * (1 + grain[..., None]), 0, 255).astype(np.uint8)


def _tone(rng: np.random.Generator, strength: float) -> np.ndarray:
    """A lookup table [1, 256, 3] of gamma, contrast, exposure and white balance."""
    level = np.arange(256, dtype=np.float32)[:, None] / 255
    gamma = np.exp(rng.uniform(-0.28, 0.28) * strength)
    gain = 1 + rng.uniform(-0.18, 0.10) * strength
    balance = 1 + rng.uniform(-0.07, 0.07, 3).astype(np.float32) * strength
    lift = rng.uniform(0, 0.07) * strength
    out = lift + (1 - lift) * level**gamma * gain * balance
    return (np.clip(out, 0, 1) * 255).astype(np.uint8)[None]


def _light(rng: np.random.Generator, height: int, width: int, strength: float) -> np.ndarray:
    """A smooth fall-off of light across the frame [h, w, 1]."""
    y, x = axes(height, width)
    angle = rng.uniform(0, 2 * np.pi)
    slope = np.cos(angle) * (2 * x / width - 1) + np.sin(angle) * (2 * y / height - 1)
    return (1 + slope * rng.uniform(0.03, 0.16) * strength)[..., None].astype(np.float32)
