"""The drawing process: examples from the little world, made into batches for the trainer."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mmserve.models.tiny import world
from mmserve.models.tiny.batches import Batch, Layout, Row, collate, patchify
from mmserve.models.tiny.example import Example, Turn
from mmserve.models.tiny.look import draw_looks
from mmserve.models.tiny.net import Grid

CELL = 32  # pixels of a merged token's side
PATCH_BUDGET = 2048  # vision patches a batch
CLIPS_FROM, CLIP_SHARE = 0.12, 0.2
LARGE_FROM, LARGE_SHARE = 0.4, 0.65
GROUPS = 5
MAX_TURNS = 4
DRILLS = 4  # short questions more about each picture: they cost little and teach to look things up
LOOKS = 20
STILL_KINDS, CLIP_KINDS = ("scene", "count", "word", "unknown"), ("clip", "unknown")


def pick_size(rng: np.random.Generator, low: int, high: int) -> tuple[int, int]:
    """Height and width in whole cells, with an area from ``low`` to ``high`` pixels, aspect up to 2."""
    while True:
        area = np.exp(rng.uniform(np.log(low), np.log(high)))
        aspect = np.exp(rng.uniform(-0.7, 0.7)) if rng.random() < 0.6 else 1.0
        height = CELL * max(2, round((area * aspect) ** 0.5 / CELL))
        width = CELL * max(2, round((area / aspect) ** 0.5 / CELL))
        if low <= height * width <= high:
            return height, width


def split_turns(rng: np.random.Generator, turns: tuple[Turn, ...]) -> list[list[Turn]]:
    """Conversations out of the turns about one picture: a third are a single question."""
    order = [turns[i] for i in rng.permutation(len(turns))]
    out = []
    while order:
        count = int(rng.choice([1, 2, 3, 4], p=[0.35, 0.25, 0.2, 0.2]))
        out.append(order[:count])
        del order[:count]
    return out


def rows_of(rng: np.random.Generator, layout: Layout, examples: list[Example]) -> list[Row]:
    """All conversations of a batch, and one without a picture; a few go on to a second picture."""
    talks = [
        (number, turns)
        for number, example in enumerate(examples)
        for turns in split_turns(rng, example.turns)
    ]
    rows = [layout.row([(world.sample_example(rng, (0, 0), "text"), None)], rng=rng)]
    while talks:
        number, turns = talks.pop()
        chain, pictures = [(examples[number], turns)], [number]
        if talks and len(turns) == 1 and rng.random() < 0.06:
            other, more = talks.pop(int(rng.integers(len(talks))))
            chain.append((examples[other], more))
            pictures.append(other)
        rows.append(layout.row(chain, pictures, rng))
    return rows


class Weights:
    """Sampling weights of kinds and loss weights of tasks, from a file that may change or not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp: float | None = None
        self.kinds: dict[str, float] = {}
        self.tasks: dict[str, float] = {}

    def refresh(self) -> None:
        stamp = self.path.stat().st_mtime if self.path.exists() else None
        if stamp == self.stamp:
            return
        content = json.loads(self.path.read_text()) if stamp else {}
        self.stamp, self.kinds, self.tasks = stamp, content.get("kinds", {}), content.get("tasks", {})

    def pick(self, rng: np.random.Generator, kinds: tuple[str, ...]) -> str:
        shares = np.array([world.KINDS[kind] * self.kinds.get(kind, 1.0) for kind in kinds])
        return kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]

    def apply(self, row: Row) -> None:
        for turn, (first, last) in zip(row.turns, row.bounds, strict=True):
            factor = self.tasks.get(turn.task, 1.0)
            row.weights[first:last] = [w * factor for w in row.weights[first:last]]


def draw_batch(rng: np.random.Generator, layout: Layout, progress: float, weights: Weights) -> Batch:
    """One batch of the curriculum at ``progress`` 0..1: small stills, then clips, then larger stills."""
    clip = progress > CLIPS_FROM and rng.random() < CLIP_SHARE
    large = not clip and progress > LARGE_FROM and rng.random() < LARGE_SHARE
    size = pick_size(rng, 20000, 192 * 192) if large else pick_size(rng, 9216, 16384 if clip else 20480)
    kinds = CLIP_KINDS if clip else STILL_KINDS
    grid: Grid = (size[0] // 16, size[1] // 16)
    patches, used = grid[0] * grid[1], 0
    examples: list[Example] = []
    while used < PATCH_BUDGET or len(examples) < 6:
        example = world.sample_example(
            rng, size, kind=weights.pick(rng, kinds), max_turns=MAX_TURNS, drills=DRILLS
        )
        if (len(example.frames) > 1) != clip:
            continue
        examples.append(example)
        used += patches * max(1, len(example.frames) // 2)
    rows = rows_of(rng, layout, examples)
    for row in rows:
        weights.apply(row)
    return collate(rows, [patchify(e.frames) for e in examples], grid, GROUPS)


def produce(queue, progress, folder: Path, seed: list[int]) -> None:
    """Fill ``queue`` with pickled batches for ever; ``progress`` is the trainer's shared clock."""
    import cv2
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    os.nice(2)
    rng = np.random.default_rng([7, *seed])
    layout = Layout(Tokenizer.from_file(str(folder / "tokenizer.json")))
    weights = Weights(folder / "weights.json")
    while True:
        weights.refresh()
        batch = draw_batch(rng, layout, progress.value, weights)
        queue.put(pickle.dumps((batch, draw_looks(rng, LOOKS))))
