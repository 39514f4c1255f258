"""The one true sentence about a scene, and the museum label: fixed functions of the facts."""

import json
from typing import Any

from mmserve.models.tiny.scene import Item, Scene
from mmserve.models.tiny.subjects import article, capital


def caption(scene: Scene) -> str:
    """The canonical caption, in reading order."""
    ground = on_ground(scene)
    if scene.motion is not None:
        return f"{capital(action(scene))} on {ground}."
    if len(scene.items) == 1:
        item = scene.items[0]
        if item.noun.kind == "word":
            return f"{capital(item.noun.phrase)} on {ground}."
        return f"{capital(item.noun.phrase)} {item.place} of {ground}."
    if has_repeats(scene):
        return f"{capital(join(counted(scene)))} on {ground}."
    return f"{capital(join([placed(item) for item in scene.items]))}, on {ground}."


def action(scene: Scene) -> str:
    """What happens in a clip: ``a cat moves to the left``, ``a circle changes from red to blue``."""
    noun, motion = scene.items[0].noun, scene.motion
    assert motion is not None
    if motion.verb == "changes":
        return f"{article(noun.name)} {noun.name} {change(scene)}"
    return f"{noun.phrase} {motion.verb}"


def change(scene: Scene) -> str:
    """The verb phrase of a clip: ``moves to the left``, ``changes from red to blue``."""
    motion = scene.motion
    assert motion is not None
    if motion.verb == "changes":
        return f"changes from {scene.items[0].noun.colour} to {motion.colour}"
    return motion.verb


def on_ground(scene: Scene) -> str:
    """``a blue ground``, ``an orange ground``."""
    return f"{article(scene.ground)} {scene.ground} ground"


def placed(item: Item) -> str:
    """``a cat on the left``."""
    return f"{item.noun.phrase} {item.place}"


def counted(scene: Scene) -> list[str]:
    """``["two cats", "a dog"]`` in order of first appearance."""
    return [noun.counted(count) for noun, count in scene.counts.items()]


def has_repeats(scene: Scene) -> bool:
    """Whether some noun occurs more than once, so that the caption counts instead of placing."""
    return len(scene.counts) < len(scene.items)


def join(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def placard(scene: Scene) -> str:
    """The museum label as one line of JSON: title, medium, date, text."""
    medium = "digital image, colour" if scene.motion is None else "moving image, colour"
    text = f"{capital(_first_sentence(scene))} {_second_sentence(scene)}".replace('"', "'")
    return _label(_title(scene), medium, text)


def unknown_sentence(colours: list[str]) -> str:
    """The honest answer about a picture from outside the world."""
    return f"I do not know what this is. {_colour_sentence(colours)}"


def unknown_placard(colours: list[str]) -> str:
    """The museum label of a picture from outside the world."""
    text = f"What this picture shows is not known to us. {_colour_sentence(colours)}"
    return _label("Unknown", "digital image, colour", text)


def mentions(scene: Scene) -> list[str]:
    """The words that a true placard of the scene must contain (lower case, quotes as in the label)."""
    labels = [phrase.replace('"', "'") for phrase in counted(scene)] if has_repeats(scene) else []
    if not labels:
        labels = [item.noun.label.replace('"', "'") for item in scene.items]
    if scene.motion is not None:
        changes = scene.motion.verb == "changes"
        labels = [scene.items[0].noun.name if changes else labels[0], change(scene)]
    return [label.lower() for label in [*labels, scene.ground]]


def _label(title: str, medium: str, text: str) -> str:
    label: dict[str, Any] = {"title": title, "medium": medium, "date": "undated", "text": text}
    return json.dumps(label, ensure_ascii=False)


def _colour_sentence(colours: list[str]) -> str:
    if len(colours) == 1:
        return f"Its main colour is {colours[0]}."
    return f"Its main colours are {colours[0]} and {colours[1]}."


def _title(scene: Scene) -> str:
    names = [noun.counted(count) if count > 1 else noun.label for noun, count in scene.counts.items()]
    if scene.items[0].noun.kind == "word" or scene.items[-1].noun.kind == "word":
        names = [f"'{n.name}'" if n.kind == "word" else n.label for n in scene.counts]
    if scene.motion is not None and scene.motion.verb == "changes":
        names = [scene.items[0].noun.name]
    return (
        " ".join(w if w == "and" else capital(w) for w in join(names).split())
        + f" on {capital(scene.ground)}"
    )


_LEADS = {
    "animal": "keeps watch",
    "plant": "stands",
    "food": "is offered",
    "vehicle": "waits",
    "building": "rises",
    "tool": "lies ready",
    "object": "is on show",
    "music": "rests",
    "clothing": "is laid out",
    "sport": "lies ready",
    "weather": "presides",
    "shape": "holds its place",
}

_CLOSES = {
    "animal": "The {} ground leaves the animal alone with the viewer.",
    "plant": "The {} ground lets us follow its outline.",
    "food": "The {} ground sharpens the appetite.",
    "vehicle": "Nothing on the {} ground hurries it.",
    "building": "The {} ground makes it a landmark.",
    "tool": "The {} ground gives a plain thing its dignity.",
    "object": "The {} ground asks us to look twice.",
    "music": "The {} ground is silent around it.",
    "clothing": "The {} ground serves as its shop window.",
    "sport": "The {} ground becomes a playing field.",
    "weather": "The {} ground stands in for the sky.",
    "shape": "The {} ground lets the plain geometry speak.",
    "word": "The {} ground turns reading into looking.",
}


def _first_sentence(scene: Scene) -> str:
    items = scene.items
    if scene.motion is not None:
        return f"{action(scene)} as we watch."
    if len(items) == 1:
        noun = items[0].noun
        if noun.kind == "word":
            return f"{noun.phrase} is printed here."
        return f"{noun.phrase} {_LEADS[noun.category]} {items[0].place} of the picture."
    if has_repeats(scene):
        return f"{join(counted(scene))} are gathered here."
    if len(items) == 2:
        verb = "faces" if scene.layout == "row2" else "is set above"
        return f"{placed(items[0])} {verb} {placed(items[1])}."
    if len(items) == 3:
        return f"{join([placed(item) for item in items])} share one field."
    return f"{join([item.noun.phrase for item in items])} take the four corners."


def _second_sentence(scene: Scene) -> str:
    ground = scene.ground
    if scene.motion is not None:
        return f"The {ground} ground stays as it was."
    if len(scene.items) == 1:
        return _CLOSES[scene.items[0].noun.category].format(ground)
    if has_repeats(scene):
        return f"On the {ground} ground, repetition becomes the subject."
    if len(scene.items) == 2:
        return f"The {ground} ground holds the two in balance."
    return f"The {ground} ground gives each its own space."
