"""Steps read nothing but static buffers, and only what may be captured is captured."""

import numpy as np
import pytest
import torch

from mmserve.backends import expected
from mmserve.core.config import Config
from mmserve.engine.attention.base import Span
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.runner.devices import CPUDevice
from mmserve.engine.runner.graphs import StepGraphs, buckets_up_to
from mmserve.models.forward import VisionRows
from mmserve.models.ops import reference
from mmserve.models.ops.native import attention as native


class Flat:
    """What StepGraphs reads of a flat batch: decodes, or with ``logit_rows`` a step with prompts."""

    def __init__(self, tokens, logit_rows=None):
        self.decodes_only = logit_rows is None
        self.logit_rows = np.array(range(len(tokens)) if logit_rows is None else logit_rows, dtype=np.int64)
        self.num_rows = len(tokens)
        self.token_ids = np.array(tokens, dtype=np.int64)
        self.positions = np.tile(np.arange(len(tokens)), (3, 1))
        self.spans = [Span(i, i, i + 1, PageTable(16)) for i in range(len(tokens))]


class Planned:
    form = "plain"

    def __init__(self, capturable, captured_rows=0):
        self.capturable = capturable
        self.captured_rows = captured_rows
        self.rows = []

    def plan(self, spans, num_rows):
        self.rows.append((len(spans), num_rows))


class Model:
    """Answers with what it was given (an id, or what vision adds to it), and remembers where that lay."""

    def __init__(self):
        self.addresses = []

    def forward(self, inputs):
        self.addresses.append((inputs.token_ids.data_ptr(), inputs.positions.data_ptr()))
        ids = inputs.token_ids.clone()
        if inputs.vision is not None:
            reference.scatter_add_rows(ids[:, None], inputs.vision.rows, inputs.vision.features[:, 0])
        return torch.stack([ids, inputs.positions[0]], dim=1)[inputs.logit_rows]


class CountingDevice(CPUDevice):
    captures = 0

    def capture(self, forward):
        self.captures += 1
        return super().capture(forward)


def graphs(capturable=True, captured_rows=0):
    model, attention, device = Model(), Planned(capturable, captured_rows), CountingDevice()
    return StepGraphs(model, attention, device, 24), model, attention, device


def fill(target, values):
    target.copy_(torch.from_numpy(values))


def vision(*rows):
    """Each adds 100 times its place in ``rows``, from 1 on."""
    return VisionRows(torch.tensor(rows), 100 * torch.arange(1, len(rows) + 1)[:, None, None])


def test_batches_are_padded_to_their_bucket_with_token_0():
    decodes, _, attention, _ = graphs()
    decodes.run(Flat([7] * 8), fill)
    logits = decodes.run(Flat([1, 2, 3, 4, 5]), fill)
    assert logits.tolist() == [[1, 0], [2, 1], [3, 2], [4, 3], [5, 4]]
    assert attention.rows == [(8, 8), (5, 8)]
    assert decodes.token_ids[5:8].tolist() == [0, 0, 0]


def test_each_bucket_is_captured_once_and_replayed_over_the_same_buffers():
    decodes, model, _, device = graphs()
    for tokens in ([1], [2], [3, 4], [5, 6], [7]):
        assert decodes.run(Flat(tokens), fill)[:, 0].tolist() == tokens
    assert device.captures == len(model.addresses) == 2
    assert len({a for a, _ in model.addresses}) == 1


def test_a_forward_that_cannot_be_recorded_runs_as_it_is_and_says_so(caplog):
    decodes, model, _, _ = graphs()
    model.forward = lambda inputs: torch.tensor([[int(inputs.token_ids[0])]])
    assert [int(decodes.run(Flat([token]), fill)[0, 0]) for token in (3, 4)] == [3, 4]
    assert "not recorded" in caplog.text


def test_a_backend_that_walks_its_plan_on_the_host_is_never_captured():
    decodes, model, _, device = graphs(capturable=False)
    assert decodes.run(Flat([9]), fill)[0, 0] == 9
    assert decodes.run(Flat([8]), fill)[0, 0] == 8
    assert device.captures == 0
    assert len(model.addresses) == 2


def test_a_forward_is_not_run_again_when_its_graph_is_made():
    decodes, model, _, _ = graphs()
    decodes.run(Flat([7]), fill)
    assert len(model.addresses) == 1


def test_all_sizes_of_decodes_may_be_captured_beforehand():
    decodes, model, attention, device = graphs()
    decodes.prepare()
    assert attention.rows == [(0, size) for size in (24, 16, 8, 4, 2, 1)]
    with torch.inference_mode():
        assert decodes.run(Flat([3, 4, 5]), fill)[:, 0].tolist() == [3, 4, 5]
    assert device.captures == len(model.addresses) == 6
    decodes.prepare()
    assert device.captures == 6, "what is there is not captured again"


def test_the_smallest_sizes_alone_may_be_captured_beforehand():
    decodes, _, attention, device = graphs()
    decodes.prepare(size for size in decodes.decode_sizes if size <= 4)
    assert attention.rows == [(0, size) for size in (4, 2, 1)]
    assert device.captures == 3


def test_steps_with_prompts_go_through_the_same_buffers_by_their_rows_and_logits():
    steps, model, _, device = graphs(captured_rows=32)
    for tokens, wanted in (
        (range(8), [0, 7]),
        (range(10, 18), [3, 1]),
        (range(16), [2]),
        (range(8), [0, 4, 5]),
    ):
        flat = Flat(list(tokens), wanted)
        assert steps.takes(flat)
        assert steps.run(flat, fill)[:, 0].tolist() == [tokens[row] for row in wanted]
    assert steps.run(Flat([9]), fill)[:, 0].tolist() == [9]
    assert device.captures == len(model.addresses) == 4  # rows and logits 8 2, 16 1, 8 4; a decode
    assert len({a for a, _ in model.addresses}) == 1


def test_vision_rows_come_in_by_buffers_and_what_is_left_of_them_goes_nowhere():
    steps, _, _, device = graphs(captured_rows=32)
    tokens, every = [1] * 8, list(range(8))
    assert steps.run(Flat(tokens, every), fill, vision(2, 3, 7))[:, 0].tolist() == [
        1,
        1,
        101,
        201,
        1,
        1,
        1,
        301,
    ]
    assert steps.run(Flat(tokens, every), fill, vision(0))[:, 0].tolist() == [101, *[1] * 7]
    assert steps.run(Flat(tokens, every), fill)[:, 0].tolist() == tokens
    assert device.captures == 2


@pytest.mark.parametrize(("rows", "logits"), [(40, 1), (8, 0), (8, 9)])
def test_steps_that_graphs_do_not_take(rows, logits):
    steps, _, _, _ = graphs(captured_rows=32)
    assert not steps.takes(Flat([1] * rows, [0] * logits))
    assert graphs(captured_rows=0)[0].takes(Flat([1]))


def test_a_plan_of_another_form_has_a_graph_of_its_own():
    decodes, model, attention, device = graphs()
    for form in ("plain", "cascade", "plain"):
        attention.form = form
        decodes.run(Flat([1]), fill)
    assert device.captures == len(model.addresses) == 2


def test_token_ids_may_be_set_before_the_forward():
    decodes, *_ = graphs()
    feed = lambda ids: ids[1:2].fill_(42)  # noqa: E731
    assert decodes.run(Flat([7, 8]), fill, feed=feed)[:, 0].tolist() == [7, 42]
    assert decodes.run(Flat([7, 8]), fill, feed=feed)[:, 0].tolist() == [7, 42]


def test_buckets_end_at_the_largest_batch():
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(20) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize(("attention", "graphs"), [("native", "recorded steps"), ("torch", "none")])
def test_what_is_recorded_is_told(attention, graphs):
    if attention == "native" and native.unusable(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no kernels in C++ here")
    assert expected(Config.of(attention_backend=attention))["graphs"]["runs"] == graphs
