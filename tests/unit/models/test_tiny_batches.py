"""Conversations become the tokens, masks and positions that serving will see."""

import itertools

import jinja2
import numpy as np
import pytest
import torch

from mmserve.models.tiny import checkpoint, tokenizer
from mmserve.models.tiny.batches import Layout, collate, group_cuts, patchify, positions
from mmserve.models.tiny.example import Example, Turn
from mmserve.models.tiny.optim import Optimizer

TURNS = (Turn("what", "What is it?", "A red fish."), Turn("count", "How many?", "Two."))


@pytest.fixture(scope="module")
def tok():
    return tokenizer.build(["What is it? A red fish. How many? Two."] * 9, 400)


def still(height=96, width=128, seed=0):
    frames = np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    return Example(frames, TURNS, "scene")


def test_row_is_the_chat_template_with_pads_expanded(tok):
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": TURNS[0].question}]},
        {"role": "assistant", "content": TURNS[0].answer},
        {"role": "user", "content": TURNS[1].question},
        {"role": "assistant", "content": TURNS[1].answer},
    ]
    text = jinja2.Template(checkpoint.CHAT_TEMPLATE).render(messages=messages)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 12)
    assert Layout(tok).row([(still(), TURNS)]).ids == tok.encode(text).ids


def test_generation_prompt_ends_where_the_answer_begins(tok):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    template = jinja2.Template(checkpoint.CHAT_TEMPLATE)
    text = template.render(messages=messages, add_generation_prompt=True)
    row = Layout(tok).row([(still(), TURNS[:1])], answered=False)
    assert row.ids == tok.encode(text.replace("<|image_pad|>", "<|image_pad|>" * 12)).ids


def test_only_answers_and_their_ends_are_wanted(tok):
    row = Layout(tok).row([(still(), TURNS)])
    batch = collate([row], [patchify(still().frames)], (6, 8))
    said = tok.decode(batch.targets.tolist(), skip_special_tokens=False)
    assert said == "A red fish.<|im_end|>Two.<|im_end|>"


def test_text_goes_on_after_the_longer_side_of_the_picture(tok):
    row = Layout(tok).row([(still(96, 160), TURNS)])
    start = row.spans[0][0]
    place = positions(row, (6, 10))
    assert place[:, start + 14].tolist() == [start, start + 2, start + 4]
    assert place[:, start + 15].tolist() == [start + 5] * 3


def test_clip_frames_follow_their_timestamps(tok):
    clip = Example(np.zeros((4, 64, 64, 3), np.uint8), TURNS, "clip", fps=2.0)
    text = tok.decode(Layout(tok).row([(clip, TURNS[:1])]).ids, skip_special_tokens=False)
    frame = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    assert text.startswith(f"<|im_start|>user\n<0.2 seconds>{frame}<1.2 seconds>{frame}What is it?")


@pytest.mark.parametrize("groups", [1, 3, 5])
def test_group_cuts_cover_all_rows_in_runs_of_two_or_more(groups):
    lengths = sorted(np.random.default_rng(groups).integers(20, 200, 41).tolist())
    cuts = group_cuts(lengths, groups)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, 41, groups + 1)
    assert all(last - first >= 2 for first, last in itertools.pairwise(cuts))


def test_optimizer_lowers_the_loss_of_a_small_net():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    x = torch.randn(64, 8)
    y = x[:, :1] * x[:, 1:2]
    optimizer = Optimizer(net)
    losses = []
    for _ in range(60):
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
