"""Decode steps read nothing but static buffers, and only what may be captured is captured."""

import numpy as np
import pytest
import torch

from mmserve.backends import expected
from mmserve.core.config import Config
from mmserve.engine.attention.base import Span
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.runner.decode import DecodeGraphs, buckets_up_to
from mmserve.engine.runner.devices import CPUDevice
from mmserve.models.ops.native import attention as native


class Flat:
    """What DecodeGraphs reads of a flat batch."""

    def __init__(self, tokens):
        self.num_rows = len(tokens)
        self.token_ids = np.array(tokens, dtype=np.int64)
        self.positions = np.tile(np.arange(len(tokens)), (3, 1))
        self.spans = [Span(i, i, i + 1, PageTable(16)) for i in range(len(tokens))]


class Planned:
    def __init__(self, capturable):
        self.capturable = capturable
        self.rows = []

    def plan(self, spans, num_rows):
        self.rows.append((len(spans), num_rows))


class Model:
    """Answers with what it was given, and remembers where that lay."""

    def __init__(self):
        self.addresses = []

    def forward(self, inputs):
        self.addresses.append((inputs.token_ids.data_ptr(), inputs.positions.data_ptr()))
        return torch.stack([inputs.token_ids, inputs.positions[0]], dim=1)


class CountingDevice(CPUDevice):
    captures = 0

    def capture(self, forward):
        self.captures += 1
        return super().capture(forward)


def graphs(capturable=True):
    model, attention, device = Model(), Planned(capturable), CountingDevice()
    return DecodeGraphs(model, attention, device, 24), model, attention, device


def test_batches_are_padded_to_their_bucket_with_token_0():
    decodes, _, attention, _ = graphs()
    decodes.run(Flat([7] * 8))
    logits = decodes.run(Flat([1, 2, 3, 4, 5]))
    assert logits.tolist() == [[1, 0], [2, 1], [3, 2], [4, 3], [5, 4]]
    assert attention.rows == [(8, 8), (5, 8)]
    assert decodes.token_ids[5:8].tolist() == [0, 0, 0]


def test_each_bucket_is_captured_once_and_replayed_over_the_same_buffers():
    decodes, model, _, device = graphs()
    for tokens in ([1], [2], [3, 4], [5, 6], [7]):
        assert decodes.run(Flat(tokens))[:, 0].tolist() == tokens
    assert device.captures == len(model.addresses) == 2
    assert len({a for a, _ in model.addresses}) == 1


def test_a_forward_that_cannot_be_recorded_runs_as_it_is_and_says_so(caplog):
    decodes, model, _, _ = graphs()
    model.forward = lambda inputs: torch.tensor([[int(inputs.token_ids[0])]])
    assert [int(decodes.run(Flat([token]))[0, 0]) for token in (3, 4)] == [3, 4]
    assert "not recorded" in caplog.text


def test_a_backend_that_walks_its_plan_on_the_host_is_never_captured():
    decodes, model, _, device = graphs(capturable=False)
    assert decodes.run(Flat([9]))[0, 0] == 9
    assert decodes.run(Flat([8]))[0, 0] == 8
    assert device.captures == 0
    assert len(model.addresses) == 2


def test_buckets_end_at_the_largest_batch():
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(20) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize(
    ("attention", "graphs"), [("native", "recorded steps of decodes"), ("torch", "none")]
)
def test_what_is_recorded_is_told(attention, graphs):
    if attention == "native" and native.unusable(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no kernels in C++ here")
    assert expected(Config.of(attention_backend=attention))["graphs"]["runs"] == graphs
