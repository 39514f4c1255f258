"""How the bundled model, tiny-vl, writes a label whose facts are true.

It was taught one way to write one, ``{"title": …, "medium": …, "date": …, "text": …}``, and no system
prompts:

* It ends the text and the label with one token, ``."}``. Where a form asks for more behind the text it finds
  no end and babbles, so its form has these four fields alone; whoever shows the label adds the others.
* Of its titles one in three is wrong, of its descriptions one in nine: of 138 pictures of its evaluation set
  90 titles are right, and 122 that are made of descriptions. So it is asked for a description first, which
  becomes the ``alt_text``, and the title is a constant of the form in which the label is asked for then.
* The frames of a camera come to a model as clips. Of stills that are shown so it often says that they move:
  25 of 40 descriptions were right, and 35 of the same stills as pictures. So a page asks about the picture.
"""

import re
from typing import Any

from mmserve.demos.placard.labels import LIMITS, Voice

QUESTION = "Describe this image."
VOICE = Voice("tiny", "tiny-vl's own", "the bundled model knows one way to write", "")
UNKNOWN = "Unknown"  # how it was taught to name what it does not know
FIELDS = ("title", "medium", "date", "text")
SAMPLES = ("cat", "rabbit", "tea")  # pictures of its world, to try: static/samples/NAME.jpg

# Its descriptions are made of few forms (``mmserve/models/tiny/captions.py``).
_WHOLE = re.compile(r"(?P<what>.+?),? (?:on|of) an? (?P<ground>\w+) ground\.")
_PLACE = re.compile(
    r" (?:on the (?:left|right)|at the (?:top|bottom)(?: left| right)?|in the (?:centre|middle))\b"
)
_MOTION = re.compile(r" (?:moves|grows|shrinks|changes|appears|disappears|stays)\b.*")
_WORD = re.compile(r'the word "(.+?)" in \w+', re.IGNORECASE)
_ARTICLE = re.compile(r"\ban? ", re.IGNORECASE)


def schema(described: str | None = None) -> dict[str, Any]:
    """The form of its label, about what was ``described`` by the model itself."""
    fields: dict[str, Any] = {
        name: {"type": "string", "minLength": 1, "maxLength": LIMITS[name]} for name in FIELDS
    }
    title = titled(described) if described else None
    if title is not None:
        fields["title"] = {"const": title}
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def titled(described: str) -> str | None:
    """``A red circle on the left and a cat on the right, on a blue ground.`` as a title, ``Red Circle and Cat
    on Blue``. None for what is no description of tiny-vl's."""
    if "do not know" in described:
        return UNKNOWN
    whole = _WHOLE.fullmatch(described.strip())
    if whole is None:
        return None
    what = _PLACE.sub("", _MOTION.sub("", whole["what"]))
    what = _ARTICLE.sub("", _WORD.sub(r"'\1'", what))
    words = [word if word == "and" else word[:1].upper() + word[1:] for word in what.split()]
    title = f"{' '.join(words)} on {whole['ground'].capitalize()}"
    return title if len(title) <= LIMITS["title"] else None
