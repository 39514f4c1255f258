"""What a camera sees for a while: shots of the little world one after the other, each with a question.

All things in them are shapes, so that drawing needs no font, and any number can be drawn from a seed.
"""

from dataclasses import replace

import numpy as np

from mmserve.models.tiny.draw import draw_scene
from mmserve.models.tiny.example import Example, Turn
from mmserve.models.tiny.questions import ASKERS
from mmserve.models.tiny.sampler import stream
from mmserve.models.tiny.scene import Scene, compose

FPS = 2.0  # of all shots
SIDE = 128
STAY = 2  # frames of a scene that does not move
GRAIN = 2.0  # of a sensor: the standard deviation of its noise, so that no two frames are alike
GONE = ("changes", "disappears")  # what cannot be told from the last frame alone

KINDS = {
    "count": ("count", "count"),
    "name": ("scene", "what"),
    "motion": ("clip", "motion"),
    "before": ("clip", ""),
}  # of a question: the kind of its scene, and of what is asked about it


def reel(kind: str, shots: int, seed: int) -> list[Example]:
    """So many shots, uint8 RGB [F, SIDE, SIDE, 3], each with one question of ``kind``, which is its task.

    ``count`` and ``name`` are about a scene that stays; ``motion`` about what moves; ``before`` about what
    the last frame does not show any more: the colour that something had, or the thing itself.
    """
    rng = stream("reel", list(KINDS).index(kind), seed)
    return [_shot(rng, kind) for _ in range(shots)]


def _shot(rng: np.random.Generator, kind: str) -> Example:
    scene = _scene(rng, kind)
    frames = draw_scene(rng, scene)
    if scene.motion is None:
        frames = np.repeat(frames, STAY, axis=0)
    noise = rng.normal(0, GRAIN, (*frames.shape[:3], 1))
    frames = np.clip(frames + noise, 0, 255).astype(np.uint8)
    return Example(frames, (replace(_asked(rng, scene, kind), task=kind),), kind, FPS)


def _scene(rng: np.random.Generator, kind: str) -> Scene:
    while True:
        scene = compose(rng, SIDE, SIDE, KINDS[kind][0], shape=1.0)
        if kind != "before" or (scene.motion is not None and scene.motion.verb in GONE):
            return scene


def _asked(rng: np.random.Generator, scene: Scene, kind: str) -> Turn:
    task = KINDS[kind][1]
    if kind == "before":
        assert scene.motion is not None
        task = "motion" if scene.motion.verb == "changes" else "what"
    turn = ASKERS[task](rng, scene)
    assert turn is not None, "each scene of this kind can be asked about so"
    return turn
