"""What is in a picture: the facts that both the drawing and the questions start from."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from mmserve.models.tiny.palette import NAMES, contrasting, legible
from mmserve.models.tiny.sprites import visible_grounds, word_fonts
from mmserve.models.tiny.subjects import SHAPES, WORDS, Noun, things

SMALLEST = 30.0
CAP_HEIGHT = 16.0
CORNERS = ("at the top left", "at the top right", "at the bottom left", "at the bottom right")
SHAPE_SHARE = 0.35  # of the nouns of a scene that are shapes
NINE = ("in the centre", "on the left", "on the right", "at the top", "at the bottom", *CORNERS)
PLACES = {
    "row2": ("on the left", "on the right"),
    "column2": ("at the top", "at the bottom"),
    "row3": ("on the left", "in the middle", "on the right"),
    "column3": ("at the top", "in the middle", "at the bottom"),
    "quad": CORNERS,
}


@dataclass(frozen=True, slots=True)
class Item:
    """A noun at a place. ``x``, ``y`` (centre) and ``size`` (longest side) are pixels; ``angle`` degrees.

    ``place`` is the words for where it is, empty where the layout does not tell.
    """

    noun: Noun
    place: str
    x: float
    y: float
    size: float
    angle: float
    font: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Motion:
    """What the single subject of a clip does; ``colour`` is the one that it changes to."""

    verb: str
    frames: int
    colour: str = ""
    switch: int = 0
    end: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Scene:
    """Items in reading order on a ground, ``height`` x ``width`` pixels; ``motion`` makes it a clip."""

    layout: str
    items: tuple[Item, ...]
    ground: str
    height: int
    width: int
    motion: Motion | None = None

    @property
    def counts(self) -> dict[Noun, int]:
        """How often each noun occurs, in order of first appearance."""
        tally: dict[Noun, int] = {}
        for item in self.items:
            tally[item.noun] = tally.get(item.noun, 0) + 1
        return tally


def pick(rng: np.random.Generator, options):
    """One of a sequence, uniformly."""
    return options[int(rng.integers(len(options)))]


def compose(
    rng: np.random.Generator, height: int, width: int, kind: str, shape: float = SHAPE_SHARE
) -> Scene:
    """Draw the facts of one scene of kind "scene", "count", "word" or "clip". With ``shape`` 1 all its nouns
    but printed words are shapes, which need no font."""
    return {"scene": _distinct, "count": _counted, "word": _printed, "clip": _moving}[kind](
        rng, height, width, shape
    )


@cache
def thing_names() -> tuple[str, ...]:
    return tuple(things())


def random_noun(rng: np.random.Generator, ground: str | None = None, shape: float = SHAPE_SHARE) -> Noun:
    """A shape or a thing that stands out on the ground (any ground when None)."""
    if rng.random() < shape:
        colours = contrasting(ground) if ground else NAMES
        return Noun("shape", pick(rng, tuple(SHAPES)), pick(rng, colours))
    for _ in range(50):
        name = pick(rng, thing_names())
        if ground is None or ground in visible_grounds(name):
            return Noun("thing", name, category=things()[name][1])
    return Noun("shape", "circle", pick(rng, contrasting(ground or "white")))


def _nouns(rng: np.random.Generator, count: int, ground: str, shape: float) -> list[Noun]:
    """Nouns that differ from each other."""
    chosen: list[Noun] = []
    while len(chosen) < count:
        noun = random_noun(rng, ground, shape)
        if noun not in chosen:
            chosen.append(noun)
    return chosen


def _tilt_of(rng: np.random.Generator, noun: Noun) -> float:
    most = SHAPES[noun.name] if noun.kind == "shape" else 25.0
    return float(rng.uniform(-most, most)) if rng.random() < 0.7 else 0.0


def _layouts(count: int, height: int, width: int) -> list[str]:
    """The layouts that have room for ``count`` subjects of at least SMALLEST pixels."""
    if count == 2:
        return ["row2"] * (width * 2 > height) + ["column2"] * (height * 2 > width)
    if count == 3:
        return ["row3"] * (width >= 0.8 * height and width >= 112) + ["column3"] * (
            height >= 0.8 * width and height >= 112
        )
    return ["quad"]


def _slots(
    rng: np.random.Generator, layout: str, height: int, width: int
) -> list[tuple[float, float, float]]:
    """(x, y, largest size) of each slot of a layout, in reading order."""
    cross = rng.uniform(0.42, 0.58)
    if layout in ("row2", "row3", "column2", "column3"):
        steps = (0.26, 0.74) if layout.endswith("2") else (0.18, 0.5, 0.82)
        along, across = (width, height) if layout.startswith("row") else (height, width)
        most = min((0.42 if len(steps) == 2 else 0.29) * along, 0.72 * across)
        wobble = 0.03 if len(steps) == 2 else 0.012
        places = [((s + rng.uniform(-wobble, wobble)) * along, cross * across) for s in steps]
        return [(a, b, most) if layout.startswith("row") else (b, a, most) for a, b in places]
    most = 0.42 * min(height, width)
    grid = [(x, y) for y in (0.26, 0.74) for x in (0.26, 0.74)]
    return [
        ((x + rng.uniform(-0.03, 0.03)) * width, (y + rng.uniform(-0.03, 0.03)) * height, most)
        for x, y in grid
    ]


def _fill(rng: np.random.Generator, layout: str, nouns: list[Noun], height: int, width: int) -> list[Item]:
    items = []
    slots = _slots(rng, layout, height, width)
    same = rng.uniform(0.72, 1.0)
    for noun, place, (x, y, most) in zip(nouns, PLACES[layout], slots, strict=True):
        size = max(min(SMALLEST, most), most * np.clip(same + rng.uniform(-0.12, 0.12), 0.66, 1.0))
        items.append(Item(noun, place, x, y, float(size), _tilt_of(rng, noun)))
    return items


def _single(rng: np.random.Generator, height: int, width: int, ground: str, shape: float) -> Item:
    noun = random_noun(rng, ground, shape)
    short = min(height, width)
    place = NINE[0] if rng.random() < 0.35 else pick(rng, NINE[1:])
    if place == NINE[0]:
        x, y = (rng.uniform(0.46, 0.54, 2) * (width, height)).tolist()
        return Item(noun, place, x, y, float(rng.uniform(0.36, 0.72) * short), _tilt_of(rng, noun))
    size = max(SMALLEST, float(rng.uniform(0.30, 0.42) * short))
    x, y = (rng.uniform(0.46, 0.54, 2) * (width, height)).tolist()
    near = rng.uniform(0.20, 0.25, 2)
    margin = size / 2 + 1
    if "left" in place or "right" in place:
        x = max(near[0] * width, margin)
        x = width - x if "right" in place else x
    if "top" in place or "bottom" in place:
        y = max(near[1] * height, margin)
        y = height - y if "bottom" in place else y
    return Item(noun, place, float(x), float(y), size, _tilt_of(rng, noun))


def _distinct(rng: np.random.Generator, height: int, width: int, shape: float) -> Scene:
    """One to four subjects that all differ."""
    ground = pick(rng, NAMES)
    count = int(rng.choice([1, 2, 3, 4], p=[0.44, 0.30, 0.14, 0.12]))
    if count == 1:
        return Scene("single", (_single(rng, height, width, ground, shape),), ground, height, width)
    layouts = _layouts(count, height, width) or ["quad"]
    layout = pick(rng, layouts)
    nouns = _nouns(rng, len(PLACES[layout]), ground, shape)
    return Scene(layout, tuple(_fill(rng, layout, nouns, height, width)), ground, height, width)


def _counted(rng: np.random.Generator, height: int, width: int, shape: float) -> Scene:
    """Two to four subjects, at least two of them alike."""
    ground = pick(rng, NAMES)
    count = int(rng.choice([2, 3, 4], p=[0.34, 0.33, 0.33]))
    first, second = _nouns(rng, 2, ground, shape)
    nouns = [first] * count
    if count > 2 and rng.random() < 0.65:
        minor = int(rng.integers(1, count // 2 + 1))
        mixed = [first] * (count - minor) + [second] * minor
        nouns = [mixed[i] for i in rng.permutation(count)]
    layouts = [name for name in _layouts(count, height, width) if len(PLACES[name]) == count]
    if count == 3 and (not layouts or rng.random() < 0.4):
        return Scene("loose", tuple(_loose(rng, nouns, height, width)), ground, height, width)
    layout = pick(rng, layouts)
    return Scene(layout, tuple(_fill(rng, layout, nouns, height, width)), ground, height, width)


def _loose(rng: np.random.Generator, nouns: list[Noun], height: int, width: int) -> list[Item]:
    """Three of the quad's four slots, in reading order."""
    left_out = int(rng.integers(4))
    filled = [*nouns[:left_out], nouns[0], *nouns[left_out:]]
    items = _fill(rng, "quad", filled, height, width)
    return [item for index, item in enumerate(items) if index != left_out]


def _printed(rng: np.random.Generator, height: int, width: int, shape: float) -> Scene:
    """A printed word, alone or above or below one subject."""
    ground = pick(rng, NAMES)
    noun = Noun("word", pick(rng, WORDS), pick(rng, legible(ground)), "word")
    font = pick(rng, word_fonts())
    text = pick(rng, (str.lower, str.upper, str.title))(noun.name)
    angle = float(rng.uniform(-7, 7)) if rng.random() < 0.6 else 0.0
    beside = height >= 0.9 * width and height >= 112 and rng.random() < 0.4
    if not beside:
        size = float(rng.uniform(0.62, 0.94) * width)
        y = float(rng.uniform(0.35, 0.65) * height)
        word = Item(noun, "in the centre", width * 0.5, y, size, angle, font, text)
        return Scene("single", (word,), ground, height, width)
    other = random_noun(rng, ground, shape)
    low = bool(rng.random() < 0.5)
    size = float(rng.uniform(0.34, 0.46) * min(height, width))
    aside = float(width * rng.uniform(0.4, 0.6))
    word_y, other_y = (height * 0.77, height * 0.27) if low else (height * 0.23, height * 0.71)
    word_place, other_place = PLACES["column2"][::-1] if low else PLACES["column2"]
    wide = float(rng.uniform(0.62, 0.92) * width)
    word = Item(noun, word_place, width * 0.5, word_y, wide, angle * 0.6, font, text)
    thing = Item(other, other_place, aside, other_y, size, _tilt_of(rng, other))
    return Scene("column2", (thing, word) if low else (word, thing), ground, height, width)


MOVES = ("moves to the left", "moves to the right", "moves up", "moves down")
VERBS = (*MOVES, *MOVES, "grows", "shrinks", "changes", "appears", "disappears", "stays still")


def _moving(rng: np.random.Generator, height: int, width: int, shape: float) -> Scene:
    """A clip of one subject that does one thing."""
    ground = pick(rng, NAMES)
    verb, frames = pick(rng, VERBS), int(pick(rng, (4, 4, 6, 6, 8)))
    noun = random_noun(rng, ground, 1.0 if verb == "changes" else max(0.4, shape))
    short = min(height, width)
    x, y = (rng.uniform(0.44, 0.56, 2) * (width, height)).tolist()
    size = float(rng.uniform(0.34, 0.5) * short)
    end, colour = (x, y, size), ""
    if verb in MOVES:
        size = max(SMALLEST, float(rng.uniform(0.30, 0.38) * short))
        near, far = rng.uniform(0.2, 0.28), rng.uniform(0.72, 0.8)
        start, stop = (far, near) if verb in ("moves to the left", "moves up") else (near, far)
        if "to the" in verb:
            x, end = start * width, (stop * width, y, size)
        else:
            y, end = start * height, (x, stop * height, size)
    elif verb in ("grows", "shrinks"):
        small, large = max(24.0, rng.uniform(0.2, 0.28) * short), rng.uniform(0.58, 0.78) * short
        size, last = (small, large) if verb == "grows" else (large, small)
        end = (x, y, last)
    elif verb == "changes":
        others = [c for c in contrasting(ground) if c in contrasting(noun.colour)]
        colour = pick(rng, others)
    motion = Motion(
        verb, frames, colour, int(rng.integers(2, frames - 1)), (float(end[0]), float(end[1]), float(end[2]))
    )
    item = Item(noun, "", float(x), float(y), float(size), _tilt_of(rng, noun))
    return Scene("single", (item,), ground, height, width, motion)
