"""Conversations about a scene: many ways to ask, exactly one right answer to each question."""

import re
from collections.abc import Callable

import numpy as np

from mmserve.models.tiny.captions import (
    caption,
    change,
    has_repeats,
    mentions,
    placard,
    unknown_placard,
    unknown_sentence,
)
from mmserve.models.tiny.example import Turn
from mmserve.models.tiny.palette import NAMES
from mmserve.models.tiny.scene import Item, Scene, pick, random_noun
from mmserve.models.tiny.subjects import NUMBERS, SHAPES, Noun, capital, plural

Asker = Callable[[np.random.Generator, Scene], Turn | None]

CAPTION_IMAGE = "Describe this image."
CAPTION_VIDEO = "Describe this video."
_CAPTION_IMAGE = (
    *(CAPTION_IMAGE,) * 5,
    "Describe this picture.",
    "Describe the image.",
    "What do you see?",
    "Caption this image.",
    "Write a caption.",
    "What is in this picture?",
)
_CAPTION_VIDEO = (
    *(CAPTION_VIDEO,) * 4,
    *(CAPTION_IMAGE,) * 2,
    "Describe this clip.",
    "What happens in this video?",
    "What do you see?",
    "Caption this video.",
)
_WHAT = ("What is this?", "What is it?", "What is shown here?", "Name the subject.", "What is that?")
_READ = (
    "What does it say?",
    "Read the word.",
    "What word is this?",
    "What is written here?",
    "Read the text.",
)
_MOTION = (
    "What happens?",
    "What does it do?",
    "How does it move?",
    "How does it change?",
    "What is going on?",
)
_MOVE = (
    "Which way does it move?",
    "Where does it move?",
    "In which direction does it go?",
    "What does it do?",
)
_PLACARD = (
    "Write a museum label for this picture.",
    "Write a museum label.",
    "Write a placard for this image.",
    "Write a placard.",
    "Write a wall label as JSON.",
)
_GROUND = (
    "What colour is the ground?",
    "What color is the ground?",
    "What is the background colour?",
    "What colour is the background?",
    "What color is the background?",
)
_TOTAL = ("How many things are there?", "How many things do you see?", "How many objects are there?")
_HOW_MANY = (
    "How many {} are there?",
    "How many {} do you see?",
    "How many {} are in the picture?",
    "Count the {}.",
)
_WHERE = ("Where is {}?", "Where in the picture is {}?", "Where do you see {}?")
_COLOUR = ("What colour is {}?", "What color is {}?", "Which colour does {} have?")
_IS_THERE = ("Is there {} in the picture?", "Is there {}?", "Do you see {}?", "Can you see {}?")
_AT = ("What is {}?", "What do you see {}?", "Which thing is {}?")

SMALL_TALK = (
    (("Hello", "Hi", "Hello!", "Good day."), "Hello. Show me a simple picture and ask me about it."),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
        "I am tiny-vl, a small model that describes simple pictures.",
    ),
    (
        ("What can you do?", "What do you know?", "Help", "How can you help me?"),
        "I can describe simple pictures and short clips, count, read a word and write a museum label.",
    ),
    (("Thank you.", "Thanks", "Thanks!"), "You are welcome."),
    (("Goodbye", "Bye", "Bye!"), "Goodbye."),
    (
        (CAPTION_IMAGE, CAPTION_VIDEO, "What do you see?", "What is this?", "How many things are there?"),
        "I see no picture. Please send one.",
    ),
)


def ask_scene(rng: np.random.Generator, scene: Scene, max_turns: int = 4) -> tuple[Turn, ...]:
    """A conversation of 2 to ``max_turns`` turns with distinct tasks, fewer where the scene allows fewer."""
    wanted = int(rng.integers(min(2, max_turns), max_turns + 1))
    order = _task_order(rng, scene)
    turns: list[Turn] = []
    for task in order:
        turn = ASKERS[task](rng, scene)
        if turn is not None and len(turns) < wanted:
            turns.append(turn)
    return tuple(turns)


def drill(rng: np.random.Generator, scene: Scene, count: int) -> tuple[Turn, ...]:
    """Up to ``count`` short questions that name a thing and must find it, or its absence, in the picture."""
    turns: dict[str, Turn] = {}
    for _ in range(2 * count):
        turn = ASKERS[pick(rng, _DRILLS)](rng, scene)
        if turn is not None and len(turns) < count:
            turns.setdefault(turn.question, turn)
    return tuple(turns.values())


def ask_unknown(
    rng: np.random.Generator, main: list[str], fair: list[str], max_turns: int = 3
) -> tuple[Turn, ...]:
    """Any question at all about a picture from outside the world, answered honestly."""
    facts = {"unknown": True, "colours": fair}
    turns = []
    for number in range(int(rng.integers(1, min(max_turns, 3) + 1))):
        if rng.random() < 0.08:
            turns.append(Turn("unknown", pick(rng, _PLACARD), unknown_placard(main), facts))
            continue
        first = number == 0 and rng.random() < 0.5
        question = pick(rng, _CAPTION_IMAGE) if first else _any_question(rng)
        turns.append(Turn("unknown", question, unknown_sentence(main), facts))
    return tuple(turns)


def ask_text(rng: np.random.Generator) -> tuple[Turn, ...]:
    """Small talk without a picture."""
    questions, answer = pick(rng, SMALL_TALK)
    return (Turn("text", pick(rng, questions), answer),)


def facts_hold(turn: Turn, answer: str) -> bool:
    """Whether an answer states the turn's facts: all mentions of a placard; for a picture from outside
    the world, that the model does not know it and no colour but fair ones. Exact match otherwise."""
    said = answer.lower()
    if turn.facts.get("unknown"):
        honest = "do not know" in said or '"unknown"' in said
        colours = [name for name in NAMES if re.search(rf"\b{name}\b", said)]
        return honest and bool(colours) and all(name in turn.facts["colours"] for name in colours)
    if turn.task == "placard":
        return all(re.search(rf"(?<!\w){re.escape(m)}(?!\w)", said) for m in turn.facts["mentions"])
    return answer.strip() == turn.answer


def _task_order(rng: np.random.Generator, scene: Scene) -> list[str]:
    """The tasks to try, most wanted first."""
    weights = dict(_WEIGHTS)
    if any(item.noun.kind == "word" for item in scene.items):
        weights["read"] = 6.0
    if has_repeats(scene):
        weights["count"] = 4.0
    if scene.motion is not None:
        weights["motion"] = 4.0
    names = list(weights)
    chance = np.array(list(weights.values()))
    order = [names[i] for i in rng.choice(len(names), len(names), replace=False, p=chance / chance.sum())]
    if rng.random() < 0.12:
        order.insert(int(rng.integers(2)), "placard")
    if rng.random() < 0.35:
        order = ["caption", *[task for task in order if task != "caption"]]
    return order


def reference(noun: Noun) -> str:
    """How a question points at a noun: ``the cat``, ``the red circle``, ``the word``."""
    return "the word" if noun.kind == "word" else f"the {noun.label}"


def _unique(scene: Scene) -> list[Item]:
    return [item for item in scene.items if scene.counts[item.noun] == 1]


def _ask_caption(rng: np.random.Generator, scene: Scene) -> Turn:
    question = pick(rng, _CAPTION_IMAGE if scene.motion is None else _CAPTION_VIDEO)
    return Turn("caption", question, caption(scene), {"mentions": mentions(scene)})


def _ask_what(rng: np.random.Generator, scene: Scene) -> Turn:
    item = pick(rng, scene.items)
    answer = item.noun.phrase
    if scene.motion is not None and scene.motion.verb == "changes":
        answer = f"{'an' if item.noun.name[0] in 'aeiou' else 'a'} {item.noun.name}"
    question = pick(rng, _WHAT) if len(scene.items) == 1 else pick(rng, _AT).format(item.place)
    return Turn("what", question, f"{capital(answer)}.")


def _ask_colour(rng: np.random.Generator, scene: Scene) -> Turn:
    inked = [item.noun for item in _unique(scene) if item.noun.colour and scene.motion is None]
    shapes = [noun.name for noun in scene.counts]
    inked = [noun for noun in inked if noun.kind == "word" or shapes.count(noun.name) == 1]
    if not inked or rng.random() < 0.4:
        return Turn("colour", pick(rng, _GROUND), f"{capital(scene.ground)}.")
    noun = pick(rng, inked)
    target = "the word" if noun.kind == "word" else f"the {noun.name}"
    return Turn("colour", pick(rng, _COLOUR).format(target), f"{capital(noun.colour)}.")


def _ask_count(rng: np.random.Generator, scene: Scene) -> Turn | None:
    if scene.motion is not None or any(item.noun.kind == "word" for item in scene.items):
        return None
    if rng.random() < 0.35:
        return Turn("count", pick(rng, _TOTAL), f"{capital(NUMBERS[len(scene.items)])}.")
    noun, count = pick(rng, list(scene.counts.items()))
    question = pick(rng, _HOW_MANY).format(plural(noun.label))
    return Turn("count", question, f"{capital(NUMBERS[count])}.")


def _ask_where(rng: np.random.Generator, scene: Scene) -> Turn | None:
    items = [item for item in _unique(scene) if item.place]
    if not items or scene.motion is not None or (len(scene.items) == 1 and items[0].noun.kind == "word"):
        return None
    relation = _ask_relation(rng, scene) if rng.random() < 0.5 else None
    if relation is not None:
        return relation
    item = pick(rng, items)
    return Turn("where", pick(rng, _WHERE).format(reference(item.noun)), f"{capital(item.place)}.")


def _ask_relation(rng: np.random.Generator, scene: Scene) -> Turn | None:
    if has_repeats(scene):
        return None
    first, last = scene.items[0].noun, scene.items[-1].noun
    if scene.layout in ("row3", "column3"):
        ends = [reference(first), reference(last)]
        one, two = ends if rng.random() < 0.5 else ends[::-1]
        return Turn("where", f"What is between {one} and {two}?", f"{capital(scene.items[1].noun.phrase)}.")
    if scene.layout not in ("row2", "column2"):
        return None
    before, after = ("to the left of", "to the right of") if scene.layout == "row2" else ("above", "below")
    if rng.random() < 0.5:
        return Turn("where", f"What is {before} {reference(last)}?", f"{capital(first.phrase)}.")
    return Turn("where", f"What is {after} {reference(first)}?", f"{capital(last.phrase)}.")


def _ask_read(rng: np.random.Generator, scene: Scene) -> Turn | None:
    for item in scene.items:
        if item.noun.kind == "word":
            return Turn("read", pick(rng, _READ), f'It says "{item.noun.name}".')
    if rng.random() < 0.12:
        return Turn("absent", pick(rng, _READ), "There is no word in the picture.")
    return None


def _ask_yesno(rng: np.random.Generator, scene: Scene) -> Turn | None:
    yes = bool(rng.random() < 0.5)
    answer = "Yes." if yes else "No."
    kind = rng.random()
    if kind < 0.3:
        colour = scene.ground if yes else pick(rng, [name for name in NAMES if name != scene.ground])
        return Turn("yesno", f"Is the ground {colour}?", answer)
    if scene.motion is not None and kind < 0.6:
        return _ask_moving(rng, scene, yes, answer)
    if scene.layout in ("row2", "column2") and not has_repeats(scene) and kind < 0.6:
        ends = [reference(scene.items[0].noun), reference(scene.items[-1].noun)]
        relation = ("to the left of", "to the right of") if scene.layout == "row2" else ("above", "below")
        turned = bool(rng.random() < 0.5)
        one, two = ends[::-1] if turned else ends
        return Turn("yesno", f"Is {one} {relation[turned == yes]} {two}?", answer)
    nouns = [noun for noun in scene.counts if noun.kind != "word"]
    if scene.motion is not None and scene.motion.verb == "changes":
        return None
    if yes and not nouns:
        return Turn("yesno", "Is there a word in the picture?", answer)
    noun = pick(rng, nouns) if yes else _absent_noun(rng, scene)
    return Turn("yesno", pick(rng, _IS_THERE).format(noun.phrase), answer)


_DOES = {
    "moves to the left": "Does it move to the left?",
    "moves to the right": "Does it move to the right?",
    "moves up": "Does it move up?",
    "moves down": "Does it move down?",
    "grows": "Does it grow?",
    "shrinks": "Does it shrink?",
    "changes": "Does it change colour?",
    "appears": "Does it appear?",
    "disappears": "Does it disappear?",
    "stays still": "Does it stay still?",
}


def _ask_moving(rng: np.random.Generator, scene: Scene, yes: bool, answer: str) -> Turn:
    assert scene.motion is not None
    verb = scene.motion.verb if yes else pick(rng, [v for v in _DOES if v != scene.motion.verb])
    return Turn("yesno", _DOES[verb], answer)


def _ask_motion(rng: np.random.Generator, scene: Scene) -> Turn | None:
    if scene.motion is None:
        return None
    ways = _MOVE if scene.motion.verb.startswith("moves") and rng.random() < 0.5 else _MOTION
    return Turn("motion", pick(rng, ways), f"It {change(scene)}.")


def _ask_absent(rng: np.random.Generator, scene: Scene) -> Turn:
    noun = _absent_noun(rng, scene)
    kind = rng.random()
    present = {other.name for other in scene.counts}
    if kind < 0.25 and noun.kind == "shape" and noun.name not in present:
        question = pick(rng, _COLOUR).format(f"the {noun.name}")
        return Turn("absent", question, f"There is no {noun.name} in the picture.")
    if kind < 0.6:
        question = pick(rng, _WHERE).format(f"the {noun.label}")
    else:
        question = pick(rng, _HOW_MANY).format(plural(noun.label))
    return Turn("absent", question, f"There is no {noun.label} in the picture.")


def _absent_noun(rng: np.random.Generator, scene: Scene) -> Noun:
    """A noun that is certainly not in the picture; often a near miss of one that is."""
    shapes = [noun for noun in scene.counts if noun.kind == "shape"]
    changing = scene.motion is not None and scene.motion.verb == "changes"
    while True:
        noun = random_noun(rng)
        if shapes and not changing and rng.random() < 0.4:
            near = pick(rng, shapes)
            noun = Noun("shape", near.name, pick(rng, NAMES))
            if rng.random() < 0.5:
                noun = Noun("shape", pick(rng, tuple(SHAPES)), near.colour)
        same_shape = changing and noun.name == scene.items[0].noun.name
        if noun not in scene.counts and not same_shape:
            return noun


def _ask_placard(rng: np.random.Generator, scene: Scene) -> Turn:
    return Turn("placard", pick(rng, _PLACARD), placard(scene), {"mentions": mentions(scene)})


def _any_question(rng: np.random.Generator) -> str:
    """A question of any task about nothing in particular."""
    noun, other = random_noun(rng), random_noun(rng)
    shape = f"the {pick(rng, tuple(SHAPES))}"
    options = (
        pick(rng, _CAPTION_IMAGE),
        pick(rng, _CAPTION_VIDEO),
        pick(rng, _WHAT),
        pick(rng, _WHAT),
        pick(rng, _READ),
        pick(rng, _MOTION),
        pick(rng, _TOTAL),
        pick(rng, _GROUND),
        pick(rng, _HOW_MANY).format(plural(noun.label)),
        pick(rng, _WHERE).format(f"the {noun.label}"),
        pick(rng, _COLOUR).format(shape),
        pick(rng, _IS_THERE).format(noun.phrase),
        pick(rng, _AT).format(pick(rng, ("on the left", "on the right", "in the centre", "at the top left"))),
        f"What is between the {noun.label} and the {other.label}?",
        f"What is above the {noun.label}?",
    )
    return pick(rng, options)


ASKERS: dict[str, Asker] = {
    "caption": _ask_caption,
    "what": _ask_what,
    "colour": _ask_colour,
    "count": _ask_count,
    "where": _ask_where,
    "read": _ask_read,
    "yesno": _ask_yesno,
    "motion": _ask_motion,
    "absent": _ask_absent,
    "placard": _ask_placard,
}
_DRILLS = ("where", "where", "absent", "yesno", "count", "what")
_WEIGHTS = {
    "caption": 3.0,
    "what": 1.6,
    "colour": 1.0,
    "count": 1.0,
    "where": 1.6,
    "read": 0.4,
    "yesno": 1.0,
    "motion": 0.01,
    "absent": 0.6,
}
