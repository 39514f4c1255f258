"""What the Triton backend promises beside right answers: steps that can be captured, whole models."""

import copy
from random import Random as Rng

import pytest
import torch
from helpers.equal_models import Random, TinyVL, renamed
from helpers.qwen_pairs import Pair
from helpers.triton_device import DEVICE, EXACT

from mmserve.encoders import attention as vision
from mmserve.engine.attention.base import Extent, Span
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool, KVShape
from mmserve.models.ops.triton import runtime

if reason := runtime.unusable(DEVICE):
    pytest.skip(f"Triton cannot run: {reason}", allow_module_level=True)

from mmserve.engine.attention.triton import TritonAttention
from mmserve.models.ops.triton import decode_attention

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 4


class Requests:
    """A backend and the reference over equal pools, in which every slot has something."""

    def __init__(self, max_decodes=8):
        torch.manual_seed(0)
        self.rng = Rng(0)
        self.pool, self.other = (
            KVPool(KVShape(1, KV_HEADS, DIM, torch.float32), 400, PAGE, DEVICE) for _ in range(2)
        )
        self.pool.data.normal_()
        self.other.data.copy_(self.pool.data)
        self.fast = TritonAttention(self.pool, Extent(HEADS, max_decodes, 400))
        self.slow = ReferenceAttention(self.other)

    def spans(self, *sizes, first_row=0):
        """``sizes``: (new tokens, tokens before) of each request."""
        spans, row = [], first_row
        for new, past in sizes:
            table = PageTable(PAGE)
            while (missing := table.pages_missing(past + new)) > 0:
                table.extend(self.pool.allocator.allocate(min(missing, self.rng.randint(1, 9))))
            spans.append(Span(row, past, past + new, table))
            row += new
        return spans

    def plan(self, spans, rows):
        self.fast.plan(spans, rows)
        self.slow.plan(spans, rows)

    def assert_equal(self, fast, rows):
        qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, device=DEVICE)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        ours, theirs = fast.forward(q, k, v, 0), self.slow.forward(q, k, v, 0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT)
        assert torch.equal(self.pool.data, self.other.data)


@pytest.mark.parametrize(
    ("rows", "form", "steps"),
    [
        (4, "decodes", [[(1, 30)] * 4, [(1, 0), (1, 199), (1, 63)], [], [(1, 7)]]),
        (1, "decodes", [[(1, 3)], [(1, 250)], []]),
        (24, "mixed", [[(20, 0)], [(1, 90), (9, 60), (1, 0), (12, 3)], [(2, 64), (2, 0)], [(24, 9)]]),
    ],
)
def test_a_captured_step_reads_nothing_but_what_the_plan_wrote(rows, form, steps):
    """A shallow copy holds what a graph would have frozen: addresses, numbers of programs, constants."""
    requests = Requests()
    requests.plan(requests.spans(*steps[0]), rows)
    frozen = copy.copy(requests.fast)
    assert frozen.form == form
    for step in steps:
        requests.plan(requests.spans(*step), rows)
        if requests.fast.form == form:
            requests.assert_equal(frozen, rows)


def test_an_empty_plan_is_one_of_decodes():
    """Graphs are captured beforehand under it."""
    requests = Requests()
    requests.plan([], 2)
    frozen = copy.copy(requests.fast)
    requests.plan(requests.spans((1, 70), (1, 5)), 2)
    assert (frozen.form, requests.fast.form) == ("decodes", "decodes")
    requests.assert_equal(frozen, 2)


def test_padding_may_stand_anywhere_in_a_step_with_prompts():
    requests = Requests()
    requests.plan([*requests.spans((1, 9)), *requests.spans((30, 2), first_row=45)], 80)
    requests.assert_equal(requests.fast, 80)


def test_requests_come_and_go_grow_and_begin_anew():
    requests, spans = Requests(max_decodes=4), []
    for step in range(8):
        spans = [Span(0, s.stop, s.stop + 1, s.table) for s in spans[-2:]]
        for span in spans:
            span.table.extend(requests.pool.allocator.allocate(span.table.pages_missing(span.stop)))
        spans += requests.spans((1 + 5 * (step % 2), 3 * step))
        row = 0
        for span in spans:
            span.row, row = row, row + len(span)
        requests.plan(spans, row)
        requests.assert_equal(requests.fast, row)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_a_context_in_any_number_of_splits(splits, monkeypatch):
    monkeypatch.setattr(decode_attention, "splits_for", lambda *_: splits)
    requests = Requests()
    requests.plan(requests.spans((1, 0), (1, 64), (1, 199)), 3)
    requests.assert_equal(requests.fast, 3)


def test_splits_fill_the_processors_and_no_more_than_there_are_blocks():
    splits = decode_attention.splits_for
    assert splits(1, 8, 32768, 132) == 32
    assert splits(8, 8, 32768, 132) == 4
    assert splits(64, 8, 32768, 132) == 1
    assert splits(1, 1, 128, 132) == 2
    assert splits(1, 1, 1 << 20, 132) == 64


# ---------------------------------------------------------------- whole models, pictures too


@pytest.fixture
def triton_everywhere(monkeypatch):
    """Pictures attend by Triton, too, as they would on a GPU."""
    if not runtime.INTERPRETED:
        pytest.skip("the models of the helpers live on a CPU")
    monkeypatch.setattr(vision, "choose_form", lambda *_: ("triton", "chosen by the test"))


def test_tiny_vl_answers_as_by_the_reference(triton_everywhere, monkeypatch):
    model = TinyVL()
    requests = [model.request("cat.jpg", "What is this?", name="a", max_tokens=3)]
    requests.append(model.request("Say something.", name="b", max_tokens=2))
    ours = model.answers(requests, attention_backend="triton")
    monkeypatch.undo()
    assert ours == model.answers(requests, attention_backend="reference")


def test_windows_and_chunks_answer_as_by_the_reference(triton_everywhere, tmp_path, monkeypatch):
    """Qwen2.5-VL, whose pictures attend within windows; its prompt is cut in the middle of a picture."""
    model = Random(Pair("qwen2_5_vl", tmp_path))
    request, options = renamed(model.requests[1], "r", max_tokens=4), {"page_size": 1, "step_tokens": 8}
    ours = model.answers([request], attention_backend="triton", **options)
    monkeypatch.undo()
    assert ours == model.answers([request], attention_backend="reference", **options)
