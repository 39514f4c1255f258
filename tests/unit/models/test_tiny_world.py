"""tiny-vl's world: what the questions say is what the picture shows."""

import colorsys
import json
from collections import Counter

import numpy as np
import pytest

from mmserve.models.tiny import captions, evalset, palette, sprites
from mmserve.models.tiny.draw import draw_scene
from mmserve.models.tiny.questions import ask_scene, facts_hold
from mmserve.models.tiny.sampler import KINDS, corpus, sample_example, stream
from mmserve.models.tiny.samples import SAMPLES, STILL_TASKS
from mmserve.models.tiny.scene import Item, Motion, Scene, compose
from mmserve.models.tiny.subjects import COLOURS, SHAPES, WORDS, Noun, article, plural, things

needs_glyphs = pytest.mark.skipif(
    not sprites.GLYPH_FONT.is_file(), reason="fonts-noto-color-emoji is missing: sprites are not tested"
)
CIRCLE = Noun("shape", "circle", "red")
CAT = Noun("thing", "cat", category="animal")


def scene_of(
    *items: Item, layout: str = "single", ground: str = "blue", motion: Motion | None = None
) -> Scene:
    return Scene(layout, items, ground, 128, 128, motion)


def pair() -> Scene:
    left = Item(CIRCLE, "on the left", 34, 64, 44, 0)
    right = Item(Noun("shape", "square", "white"), "on the right", 94, 64, 44, 0)
    return scene_of(left, right, layout="row2")


def bears_name(pixel: np.ndarray, name: str) -> bool:
    """Whether a clean pixel is nearer to the name's typical colour than to any other's."""
    gaps = {
        other: np.linalg.norm(palette.to_lab(pixel) - palette.to_lab(palette.typical(other)))
        for other in COLOURS
    }
    return min(gaps, key=gaps.__getitem__) == name


@pytest.mark.parametrize("name", COLOURS)
def test_drawn_colour_lies_in_its_own_range_and_is_called_by_its_name(name):
    rng = stream("valid", 1)
    for _ in range(50):
        rgb = palette.draw_colour(rng, name)
        assert bears_name(rgb, name)
        value = colorsys.rgb_to_hsv(*(rgb / 255))[2]
        low, high = COLOURS[name][2]
        assert low - 1e-3 <= value <= high + 1e-3
        flat = np.broadcast_to(rgb.astype(np.uint8), (64, 64, 3))
        assert palette.main_colours(np.ascontiguousarray(flat))[0][0] == name


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("ring", "crescent")])
def test_centre_of_a_shape_has_the_colour_that_is_named(shape):
    rng = stream("valid", 2, len(shape))
    for colour, ground in (("red", "white"), ("blue", "yellow"), ("white", "green")):
        item = Item(Noun("shape", shape, colour), "in the centre", 64, 64, 70, 0)
        frame = draw_scene(rng, scene_of(item, ground=ground))[0]
        assert bears_name(frame[64, 64].astype(np.float32), colour)
        assert bears_name(frame[4:12, 4:12].mean((0, 1)).astype(np.float32), ground)


def test_caption_reads_from_left_to_right_and_names_what_stands_there():
    scene = pair()
    frame = draw_scene(stream("valid", 3), scene)[0].astype(np.float32)
    assert bears_name(frame[64, 34], "red")
    assert bears_name(frame[64, 94], "white")
    assert (
        captions.caption(scene)
        == "A red circle on the left and a white square on the right, on a blue ground."
    )


@needs_glyphs
def test_composed_scenes_keep_their_geometry_clear():
    for index in range(300):
        rng = stream("valid", 4, index)
        height, width = (int(n) * 32 for n in rng.integers(3, 9, 2))
        if not 0.5 <= height / width <= 2:
            continue
        scene = compose(rng, height, width, ("scene", "count")[index % 2])
        for one in scene.items:
            assert one.size / 2 <= one.x <= width - one.size / 2
            assert one.size / 2 <= one.y <= height - one.size / 2
            assert "left" not in one.place or one.x < width * 0.4
            assert "right" not in one.place or one.x > width * 0.6
            assert "top" not in one.place or one.y < height * 0.4
            assert "bottom" not in one.place or one.y > height * 0.6
            for other in scene.items:
                gap = np.hypot(one.x - other.x, one.y - other.y)
                assert one is other or gap >= 0.95 * (one.size + other.size) / 2


@needs_glyphs
def test_count_answers_equal_the_number_of_items():
    numbers = {"One.": 1, "Two.": 2, "Three.": 3, "Four.": 4}
    seen = 0
    for index in range(400):
        rng = stream("valid", 5, index)
        scene = compose(rng, 128, 128, "count")
        sizes = {plural(noun.label): count for noun, count in scene.counts.items()}
        for turn in ask_scene(rng, scene):
            if turn.task == "count":
                named = [count for label, count in sizes.items() if f" {label}" in turn.question]
                assert numbers[turn.answer] == (max(named) if named else len(scene.items))
                seen += 1
    assert seen > 100


def test_counted_shapes_are_as_many_islands_of_ink():
    cv2 = pytest.importorskip("cv2")
    noun = Noun("shape", "square", "black")
    places = [(34, 34), (94, 34), (34, 94), (94, 94)]
    items = [Item(noun, "", x, y, 36, 5) for x, y in places]
    frame = draw_scene(stream("valid", 6), scene_of(*items, layout="quad", ground="white"))[0]
    islands, _ = cv2.connectedComponents((frame.max(2) < 90).astype(np.uint8))
    assert islands - 1 == 4


def test_moving_subject_is_where_the_answer_says():
    motion = Motion("moves to the left", 4, end=(30.0, 64.0, 40.0))
    scene = scene_of(Item(CIRCLE, "", 98, 64, 40, 0), ground="white", motion=motion)
    frames = draw_scene(stream("valid", 7), scene).astype(np.float32)
    assert frames.shape == (4, 128, 128, 3)
    assert bears_name(frames[0, 64, 98], "red")
    assert bears_name(frames[-1, 64, 30], "red")
    assert bears_name(frames[-1, 64, 98], "white")
    assert captions.caption(scene) == "A red circle moves to the left on a white ground."


def test_colour_change_and_appearance_show_in_the_frames():
    item = Item(CIRCLE, "", 64, 64, 50, 0)
    end = (64.0, 64.0, 50.0)
    change = scene_of(item, ground="white", motion=Motion("changes", 4, "blue", 2, end))
    frames = draw_scene(stream("valid", 8), change).astype(np.float32)
    assert bears_name(frames[0, 64, 64], "red")
    assert bears_name(frames[3, 64, 64], "blue")
    assert captions.caption(change) == "A circle changes from red to blue on a white ground."
    appear = scene_of(item, ground="white", motion=Motion("appears", 4, "", 2, end))
    frames = draw_scene(stream("valid", 9), appear).astype(np.float32)
    assert bears_name(frames[1, 64, 64], "white")
    assert bears_name(frames[2, 64, 64], "red")


@pytest.mark.parametrize(
    ("label", "some", "one"),
    [
        ("apple", "apples", "an"),
        ("unicorn", "unicorns", "a"),
        ("hourglass", "hourglasses", "an"),
        ("orange circle", "orange circles", "an"),
        ("torch", "torches", "a"),
        ("mouse", "mice", "a"),
        ("sheep", "sheep", "a"),
        ("strawberry", "strawberries", "a"),
        ("high heel", "high heels", "a"),
        ("toothbrush", "toothbrushes", "a"),
        ("key", "keys", "a"),
        ("red cross", "red crosses", "a"),
        ("umbrella", "umbrellas", "an"),
    ],
)
def test_articles_and_plurals(label, some, one):
    assert plural(label) == some
    assert article(label) == one


def test_captions_of_every_layout_are_plain_sentences():
    cat = Item(CAT, "at the top left", 30, 30, 40, 0)
    assert captions.caption(scene_of(cat, ground="orange")) == "A cat at the top left of an orange ground."
    three = [Item(Noun("thing", "mouse"), "", 0, 0, 40, 0)] * 3
    assert captions.caption(scene_of(*three, layout="row3")) == "Three mice on a blue ground."
    word = Item(Noun("word", "open", "red", "word"), "in the centre", 64, 64, 90, 0)
    assert captions.caption(scene_of(word, ground="white")) == 'The word "open" in red on a white ground.'


def test_the_vocabulary_is_large_and_without_doubles():
    table = things()
    assert len(table) >= 210
    assert len({glyph for glyph, _ in table.values()}) == len(table)
    assert not set(table) & (set(SHAPES) | set(COLOURS))
    assert len(set(WORDS)) == len(WORDS) >= 120
    assert all(3 <= len(word) <= 6 for word in WORDS)


@needs_glyphs
@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_example(kind):
    one, two = (sample_example(stream("valid", 11), (96, 128), kind) for _ in range(2))
    assert np.array_equal(one.frames, two.frames)
    assert one.turns == two.turns
    assert one.frames.dtype == np.uint8
    assert one.frames.shape[0] == 0 if kind == "text" else one.frames.shape[1:] == (96, 128, 3)
    other = sample_example(stream("train", 11), (96, 128), kind)
    assert kind == "text" or not np.array_equal(one.frames, other.frames)


@needs_glyphs
def test_every_answer_agrees_with_its_own_facts_and_placards_are_json():
    tasks: Counter[str] = Counter()
    for index in range(600):
        example = sample_example(stream("valid", 12, index), (96, 96), strength=0.0)
        assert 1 <= len(example.turns) <= 4
        for turn in example.turns:
            tasks[turn.task] += 1
            assert facts_hold(turn, turn.answer), turn
            assert "  " not in turn.answer
            if turn.answer.startswith("{"):
                label = json.loads(turn.answer)
                assert list(label) == ["title", "medium", "date", "text"]
                assert len(turn.answer.split()) <= 60
    wanted = {"caption", "what", "colour", "count", "where", "read", "yesno", "motion", "absent", "placard"}
    assert wanted | {"unknown", "text"} <= set(tasks)


@needs_glyphs
def test_a_wrong_answer_does_not_pass_for_a_fact():
    rng = stream("valid", 13)
    turn = next(t for t in sample_example(rng, (96, 96), "unknown", 0.0).turns)
    assert not facts_hold(turn, "A cat in the centre of a green ground.")


@needs_glyphs
def test_corpus_holds_every_name_in_questions_or_answers():
    text = "\n".join(corpus(4000, 1))
    assert all(name in text for name in things())


def test_pictures_from_outside_get_their_colours_by_area():
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:, :40] = (20, 140, 40)
    picture[:, 40:] = (128, 128, 128)
    main, fair = palette.main_colours(picture)
    assert main == ["green", "grey"]
    assert fair[:2] == main


def test_shipped_evaluation_set_is_whole_small_and_broad():
    rows = list(evalset.read_evalset())
    clean = Counter(
        turn.task for condition, example in rows if condition == "clean" for turn in example.turns
    )
    assert all(clean[task] >= 40 for task in (*STILL_TASKS, "motion"))
    assert {condition for condition, _ in rows} == set(evalset.CONDITIONS)
    for condition, example in rows:
        assert len(example.frames) == 1 or len(example.frames) % 2 == 0
        assert all(facts_hold(turn, turn.answer) for turn in example.turns)
        assert condition != "photo" or all(turn.facts["unknown"] for turn in example.turns)
    assert sum(path.stat().st_size for path in evalset.FOLDER.iterdir()) <= 3 * 2**20


def test_bad_rows_ask_the_same_as_their_clean_ones():
    turns = {condition: [] for condition in evalset.CONDITIONS}
    for condition, example in evalset.read_evalset():
        turns[condition].append(example.turns)
    assert turns["clean"] == turns["bad"]


def test_shipped_samples_have_captions_and_files():
    index = json.loads((SAMPLES / "samples.json").read_text(encoding="utf-8"))
    assert len(index) >= 8
    assert all((SAMPLES / row["file"]).is_file() and row["caption"].endswith(".") for row in index)
    assert {row["kind"] for row in index} == {"image", "video"}
