"""What a synthetic camera sees: JPEG files from a seed, of a scene that moves or stands still."""

import math
from typing import Literal

import cv2
import numpy as np

from mmserve.bench.media import photograph

Kind = Literal["moving", "static"]
QUALITY = 85
NOISE, GRAINS = 2.0, 8  # of a sensor: its standard deviation, and how many pictures of it there are
ROUND = 40  # frames in which what moves has gone round once
MOST_FRAMES = 2000  # of one camera; after these they begin anew


def frames(kind: Kind, size: tuple[int, int], count: int, seed: int) -> list[bytes]:
    """``count`` frames, at most ``MOST_FRAMES``, of ``size`` (width, height); equal ones for equal seeds, and
    no two of a camera, or of two cameras, alike: there is the noise of a sensor in each.

    In front of a photograph goes another one, a third of its width, round in an ellipse; or it stands.
    """
    width, height = size
    back = np.asarray(photograph(height, width, seed))
    front = np.asarray(photograph(max(1, height // 3), max(1, width // 3), seed + 1))
    rng = np.random.default_rng(seed)
    grains = rng.normal(0, NOISE, (GRAINS, height, width, 1)).astype(np.int16)
    return [
        _jpeg(_picture(back, front, number if kind == "moving" else 0) + _grain(grains, number))
        for number in range(min(count, MOST_FRAMES))
    ]


def _picture(back: np.ndarray, front: np.ndarray, number: int) -> np.ndarray:
    """Frame ``number`` without noise, int16 RGB [H, W, 3]."""
    picture = back.astype(np.int16)
    turn = 2 * math.pi * number / ROUND
    room = [picture.shape[axis] - front.shape[axis] for axis in (0, 1)]
    y, x = (round(room[axis] * (1 + of(turn)) / 2) for axis, of in enumerate((math.sin, math.cos)))
    picture[y : y + front.shape[0], x : x + front.shape[1]] = front
    return picture


def _grain(grains: np.ndarray, number: int) -> np.ndarray:
    """Noise of its own for each of ``MOST_FRAMES`` frames: one of a few, moved."""
    moved = number // len(grains)
    return np.roll(grains[number % len(grains)], (moved, 7 * moved), (0, 1))


def _jpeg(picture: np.ndarray) -> bytes:
    pixels = np.clip(picture, 0, 255).astype(np.uint8)[:, :, ::-1]
    done, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    assert done
    return bytes(data)
