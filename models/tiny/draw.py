"""From the facts of a scene to its pixels, at the final size, without any library call per pixel."""

from dataclasses import replace
from functools import lru_cache

import cv2
import numpy as np

from mmserve.models.tiny.grounds import draw_ground
from mmserve.models.tiny.palette import draw_colour
from mmserve.models.tiny.scene import CAP_HEIGHT, Item, Scene
from mmserve.models.tiny.sprites import Pyramid, glyph_sprite, shape_mask, word_mask
from mmserve.models.tiny.subjects import Noun, things


def draw_scene(rng: np.random.Generator, scene: Scene) -> np.ndarray:
    """The scene as uint8 RGB frames [F, height, width, 3]; F is 1 without a motion."""
    ground = draw_ground(rng, scene.ground, scene.height, scene.width)
    inks = {noun: draw_colour(rng, noun.colour) if noun.colour else None for noun in scene.counts}
    if scene.motion is None:
        for item in scene.items:
            paint(ground, item, inks[item.noun])
        return ground[None]
    item, motion = scene.items[0], scene.motion
    other = draw_colour(rng, motion.colour) if motion.colour else None
    frames = []
    for step in range(motion.frames):
        frame = ground.copy()
        after = step >= motion.switch
        if not (motion.verb == "appears" and not after) and not (motion.verb == "disappears" and after):
            ink = other if other is not None and after else inks[item.noun]
            paint(frame, _moved(item, motion.end, step / (motion.frames - 1)), ink)
        frames.append(frame)
    return np.stack(frames)


def paint(picture: np.ndarray, item: Item, ink: np.ndarray | None) -> None:
    """Put one item on a uint8 RGB picture, in place."""
    stamp(picture, levels_of(item), item.x, item.y, item_scale(item, picture.shape), item.angle, ink)


def levels_of(item: Item) -> Pyramid:
    """The sprite of an item: masks for shapes and words, premultiplied RGBA for things."""
    return word_mask(item.text, item.font)[0] if item.noun.kind == "word" else _levels(item.noun)


def item_scale(item: Item, shape: tuple[int, ...]) -> float:
    """How large the item's sprite is drawn, against its largest level, on a picture of ``shape``."""
    height, width = levels_of(item)[0].shape[:2]
    if item.noun.kind == "word":
        return _word_scale(item, word_mask(item.text, item.font)[1], height, width, shape)
    return item.size / max(height, width)


def stamp(
    picture: np.ndarray,
    levels: Pyramid,
    x: float,
    y: float,
    scale: float,
    angle: float,
    ink: np.ndarray | None,
) -> None:
    """Blend a sprite, centred at (x, y), onto the picture; ``scale`` is against its largest level."""
    level = 0
    while level + 1 < len(levels) and scale * 2 ** (level + 1) <= 1.0:
        level += 1
    sprite = levels[level]
    height, width = sprite.shape[:2]
    zoom = scale * levels[0].shape[1] / width
    cos, sin = np.cos(np.radians(angle)) * zoom, np.sin(np.radians(angle)) * zoom
    half_w = (abs(cos) * width + abs(sin) * height) / 2 + 1
    half_h = (abs(sin) * width + abs(cos) * height) / 2 + 1
    left, top = max(0, int(x - half_w)), max(0, int(y - half_h))
    right, bottom = min(picture.shape[1], int(x + half_w) + 1), min(picture.shape[0], int(y + half_h) + 1)
    shift_x = x - left - (cos * width - sin * height) / 2
    shift_y = y - top - (sin * width + cos * height) / 2
    matrix = np.array([[cos, -sin, shift_x], [sin, cos, shift_y]], np.float64)
    cut = cv2.warpAffine(sprite, matrix, (right - left, bottom - top), flags=cv2.INTER_LINEAR).astype(
        np.float32
    )
    view = picture[top:bottom, left:right]
    if ink is None:
        view[:] = cut[..., :3] + view * (1 - cut[..., 3:] / 255)
    else:
        cover = cut[..., None] / 255
        view[:] = ink * cover + view * (1 - cover)


def _word_scale(item: Item, cap: float, height: int, width: int, shape: tuple[int, ...]) -> float:
    """Wide enough for ``item.size``, capitals no smaller than CAP_HEIGHT, never beyond the picture."""
    lean = abs(np.sin(np.radians(item.angle)))
    room = (shape[1] - 4) / (width * np.cos(np.radians(item.angle)) + height * lean)
    most = min(room, 0.36 * shape[0] / height)
    return min(max(item.size / width, CAP_HEIGHT / cap), max(most, CAP_HEIGHT / cap), room)


@lru_cache(maxsize=1024)
def _levels(noun: Noun) -> Pyramid:
    return shape_mask(noun.name) if noun.kind == "shape" else glyph_sprite(things()[noun.name][0])


def _moved(item: Item, end: tuple[float, float, float], part: float) -> Item:
    x, y, size = (a + (b - a) * part for a, b in zip((item.x, item.y, item.size), end, strict=True))
    return replace(item, x=x, y=y, size=size)
