"""The last layer computes what lies behind attention for wanted rows only, and nobody can tell."""

import pytest
import torch
from helpers.dense_attention import DenseAttention
from helpers.qwen_pairs import MODELS, Pair

from mmserve.models.forward import ForwardInput, VisionRows

CASE = (5, ("image", 4, 6), 7)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return request.param, tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request, folder):
    return Pair(*folder, dtype=request.param)


def logits(pair, rows, attention=None):
    prompt = pair.prompt(*CASE)
    inputs = ForwardInput(
        token_ids=torch.tensor(prompt.ids),
        positions=pair.positions(prompt)[0],
        logit_rows=torch.tensor(rows, dtype=torch.int64),
        attention=attention or DenseAttention([len(prompt.ids)]),
        vision=VisionRows(torch.tensor(prompt.rows), pair.encode([prompt])[0]),
    )
    with torch.inference_mode():
        return pair.model.language.forward(inputs)


@pytest.mark.parametrize("rows", [[19], [0], [4, 9, 19], [19, 3, 3, 11]])
def test_logits_of_some_rows_are_those_of_all_rows(pair, rows):
    """Bit for bit where a linear layer's rows do not depend on how many there are."""
    found, wanted = logits(pair, rows), logits(pair, list(range(20)))[rows]
    if pair.model.backends["linear"] == "native":
        assert torch.equal(found, wanted)
    else:
        atol = 1e-5 if found.dtype == torch.float32 else 0.1
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def test_a_chunk_that_samples_nothing_still_leaves_its_keys_and_values(pair):
    some, every = DenseAttention([20]), DenseAttention([20])
    assert logits(pair, [], some).shape == (0, pair.model.config.text.vocab_size)
    logits(pair, list(range(20)), every)
    assert len(some.cache) == pair.model.config.text.num_layers
    for layer, stored in every.cache.items():
        assert all(torch.equal(a, b) for a, b in zip(some.cache[layer], stored, strict=True))


def test_rows_that_nobody_wants_do_not_meet_the_last_feed_forward(pair, monkeypatch):
    seen = []
    layers = pair.model.language.layers
    for layer in layers:
        forward = layer.mlp.forward
        monkeypatch.setattr(layer.mlp, "forward", lambda x, f=forward: seen.append(len(x)) or f(x))
    logits(pair, [19])
    assert seen == [20] * (len(layers) - 1) + [1]
