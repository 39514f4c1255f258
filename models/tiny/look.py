"""Learning to look before learning to speak: what covers each vision token, told for every token.

A caption names a subject once in a dozen words, so its gradient says little about which pixels made
it. Here the drawing itself says what every token of the picture shows, and the vision transformer
learns the names of things many times faster. The heads are thrown away afterwards.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.models.tiny.batches import Batch, patchify
from mmserve.models.tiny.degrade import plan, shoot
from mmserve.models.tiny.draw import item_scale, levels_of, paint, stamp
from mmserve.models.tiny.grounds import draw_ground
from mmserve.models.tiny.net import Grid, TinyVL, Vision, compile_blocks
from mmserve.models.tiny.palette import NAMES, draw_colour, legible
from mmserve.models.tiny.sampler import sample_strength, stream
from mmserve.models.tiny.scene import Item, Scene, compose, pick, random_noun
from mmserve.models.tiny.sprites import Pyramid, letter_edges, word_fonts
from mmserve.models.tiny.subjects import SHAPES, WORDS, Noun, things

CELL = 32  # pixels of a merged token's side
GROUND = 0
LOOK_WEIGHT = 0.5
GROUND_WEIGHT = 0.2  # a token that a subject merely touches is still about the subject
SIZES = (
    (128, 128),
    (96, 128),
    (128, 96),
    (96, 96),
    (160, 128),
    (128, 160),
    (160, 160),
    (192, 192),
    (160, 224),
)


@cache
def classes() -> dict[tuple[str, str], int]:
    """(kind, name) -> class of things, shapes and printed letters; 0 is the ground."""
    named = [("thing", n) for n in things()] + [("shape", n) for n in SHAPES]
    named += [("letter", n) for n in ascii_lowercase]
    return {name: index + 1 for index, name in enumerate(named)}


@dataclass(frozen=True, slots=True)
class Looks:
    """``patches`` uint8 [N, patches, pixels]; of each merged token, in merge order: ``kinds`` float
    [N * tokens, classes] (shares of its area) and ``inks`` int64 (its subject's colour, -1 for none)."""

    patches: Tensor
    grid: Grid
    kinds: Tensor
    inks: Tensor


class Looker(nn.Module):
    """The vision transformer with one head for what a token shows and one for its colour."""

    def __init__(self, visual: Vision, width: int) -> None:
        super().__init__()
        self.visual = visual
        self.kind_head = nn.Linear(width, len(classes()) + 1)
        self.ink_head = nn.Linear(width, len(NAMES))

    def speed_up(self) -> None:
        compile_blocks(self)

    def batch_loss(self, looks: Looks) -> Tensor:
        features, deep = self.visual(looks.patches, looks.grid)
        return look_loss(self.kind_head(features), self.ink_head(features), looks, deep)

    @torch.no_grad()
    def accuracy(self, looks: Looks) -> float:
        """Share of the tokens with a subject whose subject is named."""
        features, _ = self.visual(looks.patches, looks.grid)
        scores = self.kind_head(features).float()
        best, guess = looks.kinds.argmax(-1), scores.argmax(-1)
        clear = (best != GROUND) & (looks.kinds.max(-1).values > 0.6)
        return float((best == guess)[clear].float().mean())


def look_loss(kinds: Tensor, inks: Tensor, looks: Looks, unused: list[Tensor]) -> Tensor:
    """Cross-entropy of what each token shows, and of its colour; ``unused`` features get a zero gradient."""
    loss = F.cross_entropy(kinds.float(), looks.kinds)
    colour = F.cross_entropy(inks.float(), looks.inks, ignore_index=-1)
    return loss + 0.3 * colour + 0.0 * sum(u.float().mean() for u in unused)


class Learner(TinyVL):
    """tiny-vl in its second stage: it converses, and goes on naming what each token shows."""

    def __init__(self, cfg: dict) -> None:
        super().__init__(cfg)
        width = cfg["vision_config"]["out_hidden_size"]
        self.kind_head = nn.Linear(width, len(classes()) + 1)
        self.ink_head = nn.Linear(width, len(NAMES))

    def batch_loss(self, batch: tuple[Batch, Looks]) -> Tensor:
        talk, looks = batch
        features, deep = self.model.visual(looks.patches, looks.grid)
        seen = look_loss(self.kind_head(features), self.ink_head(features), looks, deep)
        return super().batch_loss(talk) + LOOK_WEIGHT * seen


def speaking(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of tiny-vl itself, without the heads of its training."""
    return {name: weight for name, weight in state.items() if name.startswith("model.")}


def fitting(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """``wanted`` with what ``state`` has of it; a head with other classes keeps the first rows it shares."""
    out = {name: weight.clone() for name, weight in wanted.items()}
    for name in out.keys() & state.keys():
        rows = min(len(out[name]), len(state[name]))
        out[name][:rows] = state[name][:rows]
    return out


def draw_looks(rng: np.random.Generator, count: int, strength: float | None = None) -> Looks:
    """``count`` pictures of one size with their labels."""
    height, width = pick(rng, SIZES)
    shots = [_shot(rng, height, width, strength) for _ in range(count)]
    grid = (height // 16, width // 16)
    kinds = np.concatenate([kinds for _, kinds, _ in shots])
    inks = np.concatenate([inks for _, _, inks in shots])
    patches = np.concatenate([patchify(picture[None]) for picture, _, _ in shots])
    return Looks(torch.from_numpy(patches), grid, torch.from_numpy(kinds), torch.from_numpy(inks))


def produce(queue, seed: list[int], count: int) -> None:
    """Fill ``queue`` with pickled batches for ever."""
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    rng = stream("train", 5, *seed)
    while True:
        queue.put(pickle.dumps(draw_looks(rng, count)))


def _shot(
    rng: np.random.Generator, height: int, width: int, strength: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = pick(rng, (_crowd, _crowd, _page, _page, _as_asked))
    scene = draw(rng, height, width)
    picture = draw_ground(rng, scene.ground, height, width)
    kinds, inks = np.zeros((height, width), np.int32), np.full((height, width), -1, np.int32)
    for item in scene.items:
        noun = item.noun
        paint(picture, item, draw_colour(rng, noun.colour) if noun.colour else None)
        for label, masks in _masks(item):
            cover = _cover(item, masks, height, width)
            kinds[cover] = classes()[label]
            inks[cover] = NAMES.index(noun.colour) if noun.colour else -1
    strength = sample_strength(rng) if strength is None else strength
    if strength > 0:
        recipe = plan(rng, height, width, strength)
        picture = shoot(rng, picture, recipe)
        if recipe.warp is not None:
            kinds, inks = _warped(kinds, recipe.warp, 0), _warped(inks, recipe.warp, -1)
    return picture, _shares(kinds), _majority(inks)


def _as_asked(rng: np.random.Generator, height: int, width: int) -> Scene:
    """A scene as the questions are about."""
    return compose(rng, height, width, pick(rng, ("scene", "word")))


def _page(rng: np.random.Generator, height: int, width: int) -> Scene:
    """Lines of one printed word each."""
    ground = pick(rng, NAMES)
    rows = max(1, round(height / rng.uniform(34, 64)))
    items = []
    for row in range(rows):
        noun = Noun("word", pick(rng, WORDS), pick(rng, legible(ground)), "word")
        text = pick(rng, (str.lower, str.upper, str.title))(noun.name)
        size, y = float(rng.uniform(0.5, 0.95) * width), float((row + 0.5) * height / rows)
        angle = float(rng.uniform(-4, 4))
        items.append(Item(noun, "", width * 0.5, y, size, angle, pick(rng, word_fonts()), text))
    return Scene("page", tuple(items), ground, height, width)


def _crowd(rng: np.random.Generator, height: int, width: int) -> Scene:
    """As many subjects as there is room for, each about a cell of a jittered lattice."""
    ground = pick(rng, NAMES)
    step = float(rng.uniform(40, 68))
    rows, columns = max(1, round(height / step)), max(1, round(width / step))
    items = []
    for row in range(rows):
        for column in range(columns):
            noun = random_noun(rng, ground, 0.2)
            size = float(min(height / rows, width / columns) * rng.uniform(0.66, 1.0))
            x = (column + 0.5 + rng.uniform(-0.12, 0.12)) * width / columns
            y = (row + 0.5 + rng.uniform(-0.12, 0.12)) * height / rows
            tilt = SHAPES[noun.name] if noun.kind == "shape" else 25.0
            items.append(Item(noun, "", float(x), float(y), size, float(rng.uniform(-tilt, tilt))))
    return Scene("crowd", tuple(items), ground, height, width)


def _masks(item: Item) -> Iterator[tuple[tuple[str, str], Pyramid]]:
    """What an item shows and where in its sprite: one for a subject, one for each letter of a word."""
    levels, noun = levels_of(item), item.noun
    if noun.kind != "word":
        yield (noun.kind, noun.name), tuple(level if level.ndim == 2 else level[..., 3] for level in levels)
        return
    edges = letter_edges(item.text, item.font)
    for letter, first, last in zip(item.text.lower(), edges, edges[1:], strict=False):
        column = np.zeros_like(levels[0])
        column[:, round(first) : round(last)] = 255
        yield ("letter", letter), (column,)


def _cover(item: Item, masks: Pyramid, height: int, width: int) -> np.ndarray:
    """bool [height, width]: where ``masks`` of the item's sprite lie in the picture."""
    canvas = np.zeros((height, width, 3), np.uint8)
    scale = item_scale(item, canvas.shape)
    stamp(canvas, masks, item.x, item.y, scale, item.angle, np.full(3, 255, np.float32))
    return canvas[..., 0] > 127


def _warped(labels: np.ndarray, warp: np.ndarray, outside: int) -> np.ndarray:
    size = labels.shape[::-1]
    moved = cv2.warpPerspective(
        labels.astype(np.float32), warp, size, flags=cv2.INTER_NEAREST, borderValue=outside
    )
    return moved.astype(np.int32)


def _cells(labels: np.ndarray) -> np.ndarray:
    """[tokens, CELL * CELL] in the reading order of merged tokens."""
    height, width = labels.shape
    cells = labels.reshape(height // CELL, CELL, width // CELL, CELL).transpose(0, 2, 1, 3)
    return cells.reshape(-1, CELL * CELL)


def _shares(kinds: np.ndarray) -> np.ndarray:
    cells = _cells(kinds)
    count = len(classes()) + 1
    index = cells + np.arange(len(cells))[:, None] * count
    shares = np.bincount(index.ravel(), minlength=len(cells) * count).reshape(-1, count).astype(np.float32)
    shares[:, GROUND] *= GROUND_WEIGHT
    return shares / shares.sum(1, keepdims=True)


def _majority(inks: np.ndarray) -> np.ndarray:
    """The colour with the largest area in each cell, -1 where no ink covers a tenth of it."""
    cells = _cells(inks)
    out = np.full(len(cells), -1, np.int64)
    for index, cell in enumerate(cells):
        seen = cell[cell >= 0]
        if len(seen) > cell.size / 10:
            out[index] = np.bincount(seen).argmax()
    return out
