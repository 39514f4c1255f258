"""Small batches of pictures over static buffers: the same features, and nothing else is read."""

import pytest
import torch
from helpers.late_device import LateDevice
from helpers.qwen_pairs import Pair

from mmserve.encoders import graphs as encoder_graphs
from mmserve.encoders.graphs import EncoderGraphs
from mmserve.encoders.parts import Resumable
from mmserve.models.ops.triton import runtime

pytestmark = pytest.mark.skipif(not runtime.INTERPRETED, reason="segments that stay are read by Triton")

BATCHES = [
    [(1, 4, 4)],
    [(1, 4, 6), (2, 2, 4), (1, 4, 4)],
    [(1, 8, 8)],
    [(2, 4, 4), (1, 6, 4)],
]


class Captured(LateDevice):
    """Copies happen at once."""

    def copy(self, target, source):
        target.copy_(source)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def encoder(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("pair")).model.encoder


@pytest.fixture
def graphs(encoder, monkeypatch):
    """Buckets of 8 and 16 tokens."""
    monkeypatch.setattr(encoder_graphs, "BUCKETS", (8, 16))
    made = EncoderGraphs(encoder.deep, encoder.config, Captured(), torch.float32)
    encoder.graphs = made
    yield made
    encoder.graphs = None


def batch(encoder, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    patch = encoder.config.patch_size
    pixels = [
        torch.randint(0, 256, (frames, h * patch, w * patch, 3), dtype=torch.uint8, generator=generator)
        for frames, h, w in sizes
    ]
    return pixels, [(h, w) for _, h, w in sizes]


def features(encoder, sizes, seed=0):
    return Resumable(encoder.parts(*batch(encoder, sizes, seed))).finish()


def test_features_are_those_of_a_forward_that_runs_as_it_is(encoder, graphs):
    """Bucket by bucket, in both, twice over the same buffers."""
    device = graphs.device
    for round_ in range(2):
        for sizes in BATCHES:
            encoder.graphs = None
            plain = features(encoder, sizes, round_)
            encoder.graphs = graphs
            for one, other in zip(features(encoder, sizes, round_), plain, strict=True):
                torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert device.log.count(("capture", "encoder")) == 2, "each bucket once, apart from the steps' graphs"


def test_features_stay_as_they_are_when_the_next_batch_is_encoded(encoder, graphs):
    first = features(encoder, [(1, 8, 8)], seed=1)[0]
    before = first.clone()
    features(encoder, [(1, 8, 8)], seed=2)
    assert torch.equal(first, before)


def test_a_replay_reads_nothing_but_its_buffers(encoder, graphs):
    """What it was captured with is gone, and is spoilt."""
    sizes = [(1, 4, 4)]
    expected = features(encoder, sizes)[0]
    held, deep = [], graphs.deep

    def spoiling(packed):
        held.append(packed)
        return deep(packed)

    again = EncoderGraphs(spoiling, encoder.config, Captured(), torch.float32)
    encoder.graphs = again
    pixels, grids = batch(encoder, [(1, 4, 6)], seed=3)
    Resumable(encoder.parts(pixels, grids)).finish()
    for tensor in pixels:
        tensor.zero_()
    torch.testing.assert_close(features(encoder, sizes)[0], expected, atol=2e-5, rtol=1e-4)
    addresses = {packed.rope[0].data_ptr() for packed in held}
    assert addresses == {again.cos.data_ptr()}


@pytest.mark.parametrize("sizes", [[(1, 10, 10)], [(1, 2, 2)] * 12])
def test_what_is_too_large_or_of_too_many_items_runs_as_it_is(encoder, graphs, sizes, monkeypatch):
    monkeypatch.setattr(encoder_graphs, "MOST_ITEMS", 2)
    encoder.graphs = None
    plain = features(encoder, sizes)
    encoder.graphs = EncoderGraphs(encoder.deep, encoder.config, Captured(), torch.float32)
    for one, other in zip(features(encoder, sizes), plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_the_largest_is_captured_first(encoder, graphs, monkeypatch):
    order = []
    capture = graphs.device.capture
    monkeypatch.setattr(
        graphs.device, "capture", lambda f, family: order.append(len(graphs._buckets)) or capture(f, family)
    )
    graphs.prepare()
    assert list(graphs._buckets) == sorted(graphs.sizes, reverse=True)
    assert order == [0, 1]
