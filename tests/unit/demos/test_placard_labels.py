"""Forms that a grammar can keep to, voices that say the rules, and how tiny-vl's labels stay true."""

import json

import msgspec
import numpy as np
import pytest

from mmserve.core.messages import Grammar
from mmserve.demos.placard import labels, tiny
from mmserve.demos.placard.app import STATIC
from mmserve.engine.grammar.guidance import GuidanceBackend
from mmserve.models.hub import resolve
from mmserve.models.tiny.evalset import read_evalset
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.tokenizer import TextTokenizer

FIXED = {"maker": "Ada's “shop”", "dimensions": "2 × 3 cm", "credit_line": "Leihgabe: \\ & 'so'"}
VOCABULARY = 1792  # the width of tiny-vl's logits


@pytest.fixture(scope="module")
def accepts():
    """Whether a text is a whole answer in the form of a schema."""
    spec = ProcessorSpec.load(resolve("mmserve/tiny-vl"))
    tokenizer = TextTokenizer(spec)
    backend = GuidanceBackend(spec.tokenizer_json, VOCABULARY, spec.eos_ids)

    def ask(schema, text):
        matcher = backend.compile(Grammar("json_schema", json.dumps(schema)))
        for token in tokenizer.encode(text):
            if not allowed(matcher, token):
                return False
            matcher.accept(token)
        return matcher.complete or any(allowed(matcher, token) for token in spec.eos_ids)

    return ask


def allowed(matcher, token):
    row = np.zeros(VOCABULARY // 32, np.int32)
    matcher.fill(row)
    return bool(row[token // 32] >> (token % 32) & 1)


def written(**fields):
    names = [name for name in labels.LIMITS if name in fields]
    return json.dumps({name: fields[name] for name in names}, ensure_ascii=False)


def whole(**changes):
    fields = {"title": "T", "medium": "m", "date": "d", "text": "Some text.", "alt_text": "a", **FIXED}
    return written(**{**fields, **changes})


def test_the_form_takes_a_label_with_the_lines_that_are_fixed(accepts):
    assert accepts(labels.schema(FIXED), whole())


@pytest.mark.parametrize(
    "changes", [{"maker": "Rembrandt"}, {"title": "t" * 81}, {"text": "t" * 601}, {"title": ""}]
)
def test_the_form_refuses_other_lines_and_more_than_the_limits(accepts, changes):
    assert not accepts(labels.schema(FIXED), whole(**changes))


def test_the_form_has_all_fields_in_the_order_of_writing_and_no_others():
    form = labels.schema(FIXED)
    assert list(form["properties"]) == list(labels.LIMITS) == list(labels.Label.__struct_fields__)
    assert form["required"] == list(form["properties"])
    assert form["additionalProperties"] is False


@pytest.mark.parametrize("language", labels.LANGUAGES, ids=lambda language: language.id)
def test_every_language_has_a_form_that_can_be_kept_to(accepts, language):
    fixed = {name: getattr(language, name) for name in labels.FIXED}
    fields = {"title": "T", "medium": "m", "date": "d", "text": "Some text.", "alt_text": "a", **fixed}
    assert accepts(labels.schema(fixed), written(**fields))
    assert all(len(value) <= labels.LIMITS[name] for name, value in fixed.items())


def test_what_the_form_lets_through_can_be_saved():
    label = msgspec.json.decode(whole(title="t" * 80, text="t" * 600), type=labels.Label)
    assert label.maker == FIXED["maker"]


def test_there_are_voices_each_with_all_rules_and_a_manner_of_its_own():
    assert len(labels.VOICES) >= 5
    assert len({voice.id for voice in labels.VOICES}) == len(labels.VOICES)
    assert len({voice.manner for voice in labels.VOICES}) == len(labels.VOICES)
    for voice in labels.VOICES:
        told = voice.instructed()
        assert "50 to 75 words" in told
        assert "25 words" in told
        assert "no real person" in told
        assert "cannot be known" in told
        assert len(told) < 4000  # it stands before every picture
    assert "the harbour" in labels.VOICES[0].instructed("the harbour")
    assert "hangs here" not in labels.VOICES[0].instructed(None)


# ---------------------------------------------------------------- tiny-vl


@pytest.mark.parametrize(
    ("described", "title"),
    [
        ("A cat in the centre of a green ground.", "Cat on Green"),
        ("An apple at the top left of an orange ground.", "Apple on Orange"),
        (
            "A red circle on the left and a rabbit on the right, on a yellow ground.",
            "Red Circle and Rabbit on Yellow",
        ),
        ("Three apples on a white ground.", "Three Apples on White"),
        ('The word "hello" in yellow on a purple ground.', "'hello' on Purple"),
        (
            'A teapot at the top and the word "tea" in brown at the bottom, on a white ground.',
            "Teapot and 'tea' on White",
        ),
        ("A rocket moves up on a black ground.", "Rocket on Black"),
        ("A circle changes from red to blue on a white ground.", "Circle on White"),
        ("I do not know what this is. Its main colour is brown.", "Unknown"),
        ("Something else entirely", None),
        ("", None),
    ],
)
def test_a_title_is_made_of_what_tiny_vl_describes(described, title):
    assert tiny.titled(described) == title


def test_titles_of_true_descriptions_are_those_that_tiny_vl_was_taught():
    """Of all scenes of the evaluation set that have both: the title made of the one is that of the other."""
    made = []
    for _, example in read_evalset():
        turns = {turn.task: turn.answer for turn in example.turns}
        if "caption" in turns and "placard" in turns:
            made.append((tiny.titled(turns["caption"]), json.loads(turns["placard"])["title"]))
    assert len(made) >= 20
    assert [pair for pair in made if pair[0] != pair[1]] == []


def test_tiny_vls_form_ends_with_the_text_and_holds_the_title(accepts):
    described = "A cat in the centre of a green ground."
    fields = {"medium": "digital image, colour", "date": "undated", "text": "A cat keeps watch."}
    assert list(tiny.schema()["properties"]) == ["title", "medium", "date", "text"]
    assert accepts(tiny.schema(), written(title="Dog", **fields))
    assert accepts(tiny.schema(described), written(title="Cat on Green", **fields))
    assert not accepts(tiny.schema(described), written(title="Dog", **fields))
    assert not accepts(tiny.schema(), written(title="Dog", **fields, alt_text="A cat."))


def test_each_voice_has_its_name_and_note_in_the_page_s_languages():
    words = (STATIC / "i18n.js").read_text(encoding="utf-8")
    for voice in (*labels.VOICES, tiny.VOICE):
        for key in (f'"voice.{voice.id}":', f'"voice.{voice.id}.note":'):
            assert words.count(key) == len(labels.LANGUAGES), key
    for name in tiny.SAMPLES:
        assert words.count(f'"sample.{name}":') == len(labels.LANGUAGES)
        assert (STATIC / "samples" / f"{name}.jpg").is_file()
