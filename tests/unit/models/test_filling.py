"""Layers are prepared one by one while a model is loaded, so that it is never in memory twice."""

import pytest
import torch
from torch import nn

from mmserve.models.layers.base import Filling, Placement
from mmserve.models.layers.embedding import Embedding, TiedHead
from mmserve.models.layers.linear import Linear, MergedLinear
from mmserve.models.ops.registry import choose_ops


class Model(nn.Module):
    def __init__(self, quantization="none"):
        super().__init__()
        cpu = torch.device("cpu")
        place = Placement(cpu, torch.float32, choose_ops(cpu, torch.float32, "plain", quantization))
        self.embedding = Embedding(10, 8, place)
        self.first = MergedLinear(8, {"q": 4, "k": 4}, place, bias=True)
        self.second = Linear(8, 8, place)
        self.head = TiedHead(self.embedding, place)


def fill(filling, *names):
    for name in names:
        filling.views[name].copy_(torch.randn(filling.views[name].shape))
        filling.filled(name)


def test_a_layer_is_prepared_when_its_last_tensor_has_come():
    model = Model()
    filling = Filling({"m": model})
    assert len(filling.views) == 6
    fill(filling, "m.q.weight", "m.k.bias", "m.k.weight")
    assert hasattr(model.first, "weight"), "one tensor is missing"
    fill(filling, "m.q.bias")
    assert not hasattr(model.first, "weight")
    assert hasattr(model.second, "weight"), "nothing of it has come"
    assert sorted(filling.views) == ["m.embedding.weight", "m.second.weight"]


def test_a_layer_without_tensors_of_its_own_is_prepared_last():
    model = Model("int8")
    filling = Filling({"m": model})
    fill(filling, *list(filling.views))
    assert model.head.packed is None
    filling.finish()
    assert model.head(model.embedding(torch.tensor([1, 2]))).shape == (2, 10)


def test_a_tensor_that_did_not_come_is_noticed():
    with pytest.raises(AssertionError, match="every tensor"):
        Filling({"m": Model()}).finish()
