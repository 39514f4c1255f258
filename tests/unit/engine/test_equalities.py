"""What an answer may not depend on: its neighbours, how its prompt was cut, what was cached, who gave way.

On random models of the older families and on the bundled one, which is of the newest; ``test_engine.py`` and
``test_prefix_cache.py`` hold the same for a random model of that. Everything is greedy and in float32, and
log-probabilities are compared too.
"""

from itertools import pairwise

import numpy as np
import pytest
from helpers.engine_requests import prepared
from helpers.equal_models import (
    TOP,
    TWO_PICTURES,
    Random,
    TinyVL,
    answered,
    renamed,
    said,
    swapped,
    with_pages,
    with_pixels,
)
from helpers.qwen_pairs import Pair

from mmserve.engine.runner.devices import CPUDevice, EagerGraph

MANY = 2000


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2_vl", "off"),
        ("qwen2_vl", "on"),
        ("qwen2_5_vl", "off"),
        ("tiny-vl", "off"),
        ("tiny-vl", "on"),
    ],
    ids=lambda param: f"{param[0]}, overlap {param[1]}",
)
def model(request, tmp_path_factory):
    """With steps in flight and without; the answers that all are compared with come from the latter."""
    name, overlap = request.param
    if name == "tiny-vl":
        return TinyVL(overlap=overlap)
    return Random(Pair(name, tmp_path_factory.mktemp("model")), overlap=overlap)


@pytest.fixture(scope="module")
def alone(model):
    return [model.cold(request) for request in model.requests]


def test_answers_in_a_batch_are_those_of_each_alone(model, alone):
    assert model.answers(model.requests) == alone
    assert all(one.unlike(other) for one, other in zip(alone, alone[1:] + alone[:1], strict=True))


def test_recorded_steps_answer_as_those_that_are_not(model, alone, monkeypatch):
    def capture(self, forward):
        forward()
        return EagerGraph(forward)

    monkeypatch.setattr(CPUDevice, "capture", capture)
    assert model.answers(model.requests) == alone


@pytest.mark.parametrize("index", [TWO_PICTURES, TWO_PICTURES + 1])
def test_a_prompt_cut_into_chunks_of_any_size_is_answered_as_the_whole(model, alone, index):
    """Two pictures, and a clip. In the short prompts of the random models every place is cut."""
    request = renamed(model.requests[index], "cut", max_tokens=3)
    short = request.num_tokens < 50
    sizes = range(1, request.num_tokens) if short else (7, 50, 99, 180)
    cuts = set()
    for size in sizes:
        assert model.answers([request], step_tokens=size, page_size=7) == [alone[index].cut(3)], size
        cuts |= set(range(size, request.num_tokens, size))
    inside = [any(start < cut < stop for cut in cuts) for start, stop in (i.span for i in request.items)]
    assert all(inside)
    assert not short or cuts == set(range(1, request.num_tokens))


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_what_is_cached_is_answered_as_what_is_not(model, alone, page_size):
    engine = model.engine(page_size=page_size)
    assert answered(engine, model.requests) == alone
    encoded = engine.stats()["encoded_items"]
    for request, answer in zip(model.requests, alone, strict=True):
        [again] = answered(engine, [request])
        known = request.num_tokens - 1
        assert again == answer
        assert again.cached == known - known % page_size
    assert engine.stats()["encoded_items"] == encoded


def test_features_that_were_kept_serve_as_well_as_new_ones(model, alone):
    """Without prefixes: the words are computed again, the pictures are not encoded again."""
    engine = model.engine(prefix_caching=False)
    assert answered(engine, model.requests) == alone
    encoded = engine.stats()["encoded_items"]
    assert answered(engine, model.requests) == alone
    assert engine.stats()["encoded_items"] == encoded


@pytest.mark.parametrize("cached", [True, False])
def test_who_gave_way_and_came_back_answers_as_undisturbed(model, cached):
    """Three of one length, and pages for two of them with some of their answers."""
    first = model.requests[1]
    turned = [
        with_pixels(first, [first.items[0].pixels[:, ::-1]]),
        with_pixels(first, [255 - first.items[0].pixels]),
    ]
    requests = [renamed(r, f"{n}", max_tokens=60) for n, r in enumerate((first, *turned))]
    undisturbed = [model.cold(r) for r in requests]
    engine = model.engine(page_size=1, prefix_caching=cached)
    with_pages(engine, 2 * (first.num_tokens + 20))
    for request in requests:
        engine.submit(request)
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    assert engine.stats()["preemptions"] > 0
    assert [said(outputs[r.request_id]) for r in requests] == undisturbed


def test_a_picture_then_another_then_the_first_under_one_text(model):
    """A, B, A: each as cold, B not as A, and the second A wholly from the cache."""
    first = model.requests[1]
    other = with_pixels(first, [255 - first.items[0].pixels])
    order = [renamed(r, str(n)) for n, r in enumerate((first, other, first))]
    cold = [model.cold(r) for r in order]
    engine = model.engine(page_size=1)
    warm = [answered(engine, [r])[0] for r in order]
    assert warm == cold
    assert [w.cached for w in warm] == [0, first.items[0].span[0], first.num_tokens - 1]
    assert cold[0].unlike(cold[1])


def test_two_pictures_in_the_other_order_are_answered_otherwise_and_as_cold(model):
    one = model.requests[TWO_PICTURES]
    both = [one, renamed(swapped(one), "swapped")]
    cold = [model.cold(r) for r in both]
    assert cold[0].unlike(cold[1])
    engine = model.engine(page_size=1)
    assert [answered(engine, [r])[0] for r in (*both, *both)] == cold * 2
    assert engine.stats()["encoded_items"] == 2
    assert model.answers(both) == cold


def test_thousands_of_tiny_pictures_are_told_apart_with_caches_as_without(tmp_path):
    """Twice in another order, through pools that hold a part of them: every answer is its own picture's."""
    pair = Pair("qwen3_vl", tmp_path)
    model = Random(pair)
    first = prepared(pair, pair.prompt(1, ("image", 2, 2), seed=0), max_tokens=2, logprobs=TOP)
    rng = np.random.default_rng(5)
    pictures = rng.integers(0, 256, (MANY, 1, 32, 32, 3), dtype=np.uint8)
    requests = [renamed(with_pixels(first, [p]), str(n)) for n, p in enumerate(pictures)]
    many = {"max_waiting": MANY, "page_size": 1, "encoder_tokens": 64}
    plain = model.answers(requests, prefix_caching=False, **many)
    apart = sum(one.unlike(other) for one, other in pairwise(plain))
    assert apart > 0.95 * MANY, "or this would say little"
    engine = with_pages(model.engine(**many), MANY * 2)
    engine.stage.pool.capacity_bytes = MANY // 4 * engine.stage.token_bytes
    assert answered(engine, requests) == plain
    shuffled = rng.permutation(MANY)
    assert answered(engine, [requests[n] for n in shuffled]) == [plain[n] for n in shuffled]
    assert MANY < engine.stats()["encoded_items"] < 2 * MANY, "some were kept, some had to go"
