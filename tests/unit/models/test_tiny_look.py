"""The labels of the first stage agree with the drawing, and what it teaches moves to the whole model."""

import numpy as np
import pytest
import torch

from mmserve.models.tiny import checkpoint, look
from mmserve.models.tiny.net import Vision
from mmserve.models.tiny.optim import Optimizer
from mmserve.models.tiny.palette import NAMES
from mmserve.models.tiny.sampler import stream
from mmserve.models.tiny.scene import Item, Scene
from mmserve.models.tiny.sprites import GLYPH_FONT, word_fonts
from mmserve.models.tiny.subjects import Noun

needs_font = pytest.mark.skipif(
    not GLYPH_FONT.is_file(), reason="apt-get install fonts-noto-color-emoji fonts-dejavu-core"
)


def labelled(monkeypatch, items, strength=0.0):
    """The labels [4, 4] of a 128 x 128 picture of ``items`` on white."""
    scene = Scene("crowd", tuple(items), "white", 128, 128)
    monkeypatch.setattr(look, "pick", lambda rng, options: lambda *_: scene)
    _, kinds, inks = look._shot(np.random.default_rng(0), 128, 128, strength)
    return kinds.reshape(4, 4, -1), inks.reshape(4, 4)


def test_token_under_a_shape_is_labelled_with_its_name_and_colour(monkeypatch):
    square = Item(Noun("shape", "square", "red"), "", 32, 96, 60, 0.0)
    kinds, inks = labelled(monkeypatch, [square])
    label = look.classes()["shape", "square"]
    assert (kinds[2:, :2].argmax(-1) == label).all()
    assert (inks[2:, :2] == NAMES.index("red")).all()
    assert (kinds[:2, 2:, look.GROUND] == 1).all()
    assert (inks[:2, 2:] == -1).all()


@needs_font
def test_printed_word_is_labelled_letter_by_letter(monkeypatch):
    word = Item(Noun("word", "door", "red", "word"), "", 64, 64, 120, 0.0, word_fonts()[0], "DOOR")
    kinds, inks = labelled(monkeypatch, [word])
    names = {label: name for (_, name), label in look.classes().items()}
    best = [names[int(label)] for label in kinds[1, :, 1:].argmax(-1) + 1]
    assert best == ["d", "o", "o", "r"]
    assert (inks[1] == NAMES.index("red")).all()


def test_later_items_cover_earlier_ones(monkeypatch):
    below, above = (Item(Noun("shape", name, "red"), "", 64, 64, 120, 0.0) for name in ("circle", "square"))
    kinds, _ = labelled(monkeypatch, [below, above])
    assert (kinds[1:3, 1:3, look.classes()["shape", "square"]] > 0.99).all()


@needs_font
def test_shares_of_a_token_add_up_to_one():
    looks = look.draw_looks(stream("valid", 1), 4, strength=0.8)
    tokens = 4 * looks.grid[0] * looks.grid[1] // 4
    assert looks.kinds.shape == (tokens, len(look.classes()) + 1)
    assert torch.allclose(looks.kinds.sum(-1), torch.ones(tokens), atol=1e-5)
    assert looks.inks.shape == (tokens,)


@needs_font
def test_pretrained_trunk_is_adopted_and_rests():
    visual = Vision(checkpoint.VISION)
    optimizer = Optimizer(look.Learner(small_config()))
    optimizer.adopt({f"model.visual.{n}": w for n, w in visual.state_dict().items()}, settle=2)
    masters = dict(zip(optimizer.names, optimizer.masters, strict=True))
    name = "model.visual.blocks.0.mlp.linear_fc1.weight"
    before = masters[name].clone()
    assert torch.equal(before, visual.state_dict()["blocks.0.mlp.linear_fc1.weight"].float())
    moved = []
    for _ in range(3):
        for parameter in optimizer.live:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(1.0)
        moved.append(not torch.equal(masters[name], before))
    assert moved == [False, False, True]


def test_heads_of_the_training_are_not_part_of_the_model():
    learner = look.Learner(small_config())
    kept = look.speaking(learner.state_dict())
    assert kept
    assert not [name for name in kept if "head" in name]


def small_config():
    text = {
        "vocab_size": 64,
        "hidden_size": 192,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [12, 10, 10]},
    }
    return {"text_config": text, "vision_config": dict(checkpoint.VISION)}


def test_moving_average_begins_anew_with_adopted_weights():
    optimizer = Optimizer(look.Learner(small_config()))
    optimizer.steps = 1000
    optimizer.adopt({}, settle=0)
    old = [m.clone() for m in optimizer.masters]
    for parameter in optimizer.live:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(1.0)
    for before, average, now in zip(old, optimizer.average, optimizer.masters, strict=True):
        assert (average - now).norm() < 0.2 * (before - now).norm()
    kept = Optimizer(look.Learner(small_config()))
    kept.load(optimizer.state())
    assert (kept.steps, kept.average_from) == (1001, 1000)
