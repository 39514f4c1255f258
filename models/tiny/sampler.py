"""The door of the world: draw one example, or only its texts.

Seeds: ``stream(split, seed)`` gives generators that never meet between splits.
"""

from collections.abc import Iterator

import numpy as np

from mmserve.models.tiny.degrade import degrade, plan, shoot
from mmserve.models.tiny.draw import draw_scene
from mmserve.models.tiny.example import Example
from mmserve.models.tiny.palette import NAMES, main_colours
from mmserve.models.tiny.questions import ask_scene, ask_text, ask_unknown, drill
from mmserve.models.tiny.scene import compose
from mmserve.models.tiny.strange import draw_strange

KINDS: dict[str, float] = {
    "scene": 0.46,
    "count": 0.12,
    "word": 0.14,
    "clip": 0.14,
    "unknown": 0.125,
    "text": 0.015,
}
SPLITS = {"train": 1, "valid": 2, "eval": 3, "samples": 4, "reel": 5}


def stream(split: str, *seed: int) -> np.random.Generator:
    """A generator for a split of SPLITS; any number of seed parts (epoch, worker, index)."""
    return np.random.default_rng([SPLITS[split], *seed])


def sample_kind(rng: np.random.Generator) -> str:
    """A kind by the default weights."""
    return str(rng.choice(list(KINDS), p=np.array(list(KINDS.values())) / sum(KINDS.values())))


def sample_strength(rng: np.random.Generator) -> float:
    """How bad the camera is in training: half the pictures are clean."""
    return 0.0 if rng.random() < 0.5 else float(rng.uniform(0.1, 1.0))


def sample_example(
    rng: np.random.Generator,
    size: tuple[int, int],
    kind: str | None = None,
    strength: float | None = None,
    max_turns: int = 4,
    drills: int = 0,
) -> Example:
    """Draw one example of ``size`` = (height, width) pixels, with up to ``drills`` short questions more.

    ``kind`` is one of KINDS (by weight when None); ``strength`` is the camera's badness in 0..1 (as in
    training when None). Kind "text" has no frames: shape [0, 0, 0, 3].
    """
    kind = sample_kind(rng) if kind is None else kind
    strength = sample_strength(rng) if strength is None else strength
    height, width = size
    if kind == "text":
        return Example(np.zeros((0, 0, 0, 3), np.uint8), ask_text(rng), kind)
    if kind == "unknown":
        return _unknown(rng, height, width, strength, max_turns)
    scene = compose(rng, height, width, kind)
    frames = photograph(rng, draw_scene(rng, scene), strength)
    turns = ask_scene(rng, scene, max_turns) + drill(rng, scene, drills)
    return Example(frames, turns, kind)


def photograph(
    rng: np.random.Generator, frames: np.ndarray, strength: float, every: bool = False
) -> np.ndarray:
    """All frames through one camera of the given badness; ``every`` forces each of its faults."""
    if strength <= 0:
        return frames
    recipe = plan(rng, frames.shape[1], frames.shape[2], strength, every)
    return np.stack([shoot(rng, frame, recipe) for frame in frames])


def corpus(count: int, seed: int) -> Iterator[str]:
    """The questions and answers of ``count`` examples, one text each, without drawing any picture."""
    rng = stream("train", 0, seed)
    for _ in range(count):
        kind = sample_kind(rng)
        if kind == "text":
            turns = ask_text(rng)
        elif kind == "unknown":
            names = [NAMES[i] for i in rng.permutation(len(NAMES))[: int(rng.integers(1, 3))]]
            turns = ask_unknown(rng, names, names)
        else:
            turns = ask_scene(rng, compose(rng, 160, 160, kind))
        for turn in turns:
            yield turn.question
            yield turn.answer


def _unknown(rng: np.random.Generator, height: int, width: int, strength: float, max_turns: int) -> Example:
    if rng.random() < 0.1:
        return _unknown_clip(rng, height, width, max_turns)
    picture = degrade(rng, draw_strange(rng, height, width), strength)
    return Example(picture[None], ask_unknown(rng, *main_colours(picture), max_turns), "unknown")


def _unknown_clip(rng: np.random.Generator, height: int, width: int, max_turns: int) -> Example:
    """A slow pan over a strange picture."""
    count = int(rng.choice([4, 6]))
    wide = draw_strange(rng, height, width + width // 3)
    step = (width // 3) // (count - 1)
    frames = np.stack([wide[:, i * step : i * step + width] for i in range(count)])
    if rng.random() < 0.5:
        frames = frames[::-1]
    return Example(
        np.ascontiguousarray(frames), ask_unknown(rng, *main_colours(frames[0]), max_turns), "unknown"
    )
