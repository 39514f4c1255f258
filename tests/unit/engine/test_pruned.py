"""Clips that have lost cells: whole items are encoded, and the rest is as if those were never there."""

import numpy as np
import pytest
from helpers.engine_requests import drain, make_engine
from helpers.equal_models import TOP, TinyVL, answered, assert_at_rest, renamed
from helpers.preparing import chat_of
from helpers.pruned import cells, greedy_reference, masks, request_of, standing
from helpers.qwen_pairs import Pair
from msgspec.structs import replace

from mmserve.core.messages import SamplingParams, TextPart, VideoPart
from mmserve.encoders.stage import EncoderStage

CASES = [
    (4, ("video", 4, 4, 8), 6),
    (2, ("image", 6, 4), 5, ("video", 3, 8, 6), 4, ("video", 2, 4, 4), 3),
    (1, ("video", 1, 4, 4), 1),
    (3, ("video", 5, 6, 6), 2),
]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def world(request, tmp_path_factory):
    """A pair, its prompts with what is kept of them, and those as requests."""
    pair = Pair(request.param, tmp_path_factory.mktemp("model"))
    prompts = [pair.prompt(*case, seed=number) for number, case in enumerate(CASES)]
    kept = [masks(pair, prompt, 0.5, seed) for seed, prompt in enumerate(prompts)]
    pairs = list(zip(prompts, kept, strict=True))
    requests = [
        request_of(pair, prompt, own, str(i), max_tokens=8, logprobs=TOP)
        for i, (prompt, own) in enumerate(pairs)
    ]
    return pair, pairs, requests


@pytest.fixture(scope="module")
def alone(world):
    pair, _, requests = world
    return [cold(pair, request) for request in requests]


def cold(pair, request):
    return answered(make_engine(pair, prefix_caching=False, step_tokens=2048), [request])[0]


def test_answers_are_those_of_transformers_given_the_rows_that_are_kept(world, alone):
    pair, pairs, _ = world
    assert any(own is not None for _, kept in pairs for own in kept)
    for (prompt, kept), answer in zip(pairs, alone, strict=True):
        assert answer.tokens == greedy_reference(pair, prompt, kept, 8)


def test_with_everything_kept_the_reference_is_that_of_the_whole(world):
    pair, pairs, _ = world
    prompt, kept = pairs[0]
    nothing = [None] * len(kept)
    assert greedy_reference(pair, prompt, nothing, 6) == pair.reference_greedy(prompt, 6)
    assert standing(pair, prompt, nothing).all()


def test_in_a_batch_as_alone(world, alone):
    pair, _, requests = world
    assert answered(make_engine(pair), requests) == alone


def test_cut_anywhere_as_whole(world, alone):
    pair, _, requests = world
    request = renamed(requests[1], "cut", max_tokens=3)
    cuts = set()
    for size in (1, 5, 21):
        engine = make_engine(pair, step_tokens=size, page_size=7)
        assert answered(engine, [request]) == [alone[1].cut(3)], size
        cuts |= set(range(size, request.num_tokens, size))
    assert cuts == set(range(1, request.num_tokens))


@pytest.mark.parametrize("page_size", [1, 5])
def test_cached_as_cold(world, alone, page_size):
    pair, _, requests = world
    engine = make_engine(pair, page_size=page_size)
    assert answered(engine, requests) == alone
    encoded = engine.stats()["encoded_items"]
    again = answered(engine, requests)
    assert again == alone
    assert all(answer.cached > 0 for answer in again)
    assert engine.stats()["encoded_items"] == encoded


def test_the_pool_holds_the_kept_rows_alone(world):
    pair, pairs, requests = world
    prompt, kept = pairs[1]
    engine = make_engine(pair)
    answered(engine, [requests[1]])
    sizes = [
        cells(pair, grid) if own is None else len(own)
        for own, (_, _, grid) in zip(kept, prompt.items, strict=True)
    ]
    whole = [cells(pair, grid) for _, _, grid in prompt.items]
    assert engine.stage.pool.used_bytes == sum(sizes) * engine.stage.token_bytes
    assert engine.stats()["encoded_tokens"] == sum(whole) > sum(sizes)
    assert_at_rest(engine)


def test_one_item_under_two_masks_is_two_items(world):
    pair, pairs, _ = world
    prompt, kept = pairs[3]
    other = [None if own is None else np.sort((own + 1) % 9).astype(np.int32) for own in kept]
    both = [
        request_of(pair, prompt, own, name, max_tokens=6, logprobs=TOP)
        for name, own in (("one", kept), ("other", other))
    ]
    expected = [cold(pair, request) for request in both]
    assert expected[0].unlike(expected[1])
    engine = make_engine(pair, page_size=1)
    assert [answered(engine, [request])[0] for request in (*both, *both)] == expected * 2


@pytest.mark.parametrize("page_size", [3])
def test_a_context_computed_ahead_may_end_within_a_pruned_item(world, alone, page_size):
    """Pages end inside of it, so that the rest of it is for whoever asks."""
    pair, _, requests = world
    request, ends = requests[0], [item.span[1] for item in requests[0].items]
    for stop in ends:
        engine = make_engine(pair, page_size=page_size)
        engine.submit(
            replace(
                request,
                request_id="warm",
                warm=True,
                token_ids=request.token_ids[:stop],
                radix_keys=request.radix_keys[:stop],
                positions=request.positions[:, :stop],
                items=tuple(item for item in request.items if item.span[1] <= stop),
                sampling=SamplingParams(),
            )
        )
        drain(engine)
        assert answered(engine, [request]) == [alone[0]], stop
    assert any(end % page_size for end in ends)


# ---------------------------------------------------------------- budgets


def test_the_encoder_s_budget_counts_whole_grids(world):
    pair, _, requests = world
    stage: EncoderStage = make_engine(pair).stage
    item = next(i for i in requests[0].items if i.kept is not None)
    assert stage.tokens(item) == len(item.kept)
    assert stage.cost(item) == item.grid[0] * item.grid[1] // 4 > stage.tokens(item)
    stage.budget_tokens = stage.cost(item)
    several = [i for i in requests[0].items if i.kept is not None]
    assert len(several) > 1
    assert len(stage.next_batch(several)) == 1


def test_a_clip_that_fits_without_what_it_repeats_is_let_in(world):
    pair, pairs, requests = world
    most = requests[0].num_tokens + 8
    assert len(pairs[0][0].ids) >= most, "the whole would not fit"
    engine = make_engine(pair, max_model_len=most)
    assert len(answered(engine, [requests[0]])[0].tokens) == 8


# ---------------------------------------------------------------- the bundled model


def test_tiny_vl_answers_about_a_pruned_clip_as_the_reference_batched_cached_and_cut():
    model = TinyVL()
    frames = np.random.default_rng(0).integers(0, 256, (1, 96, 96, 3), np.uint8).repeat(8, 0)
    frames[4:, 40:60, 40:60] = 255
    chat = chat_of(VideoPart(frames=frames, video_pruning_rate=0.9), TextPart("What moves?"))
    request = model.processor.prepare(chat).request
    request = replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=8, logprobs=TOP))
    assert any(item.kept is not None for item in request.items)
    expected = model.cold(request)
    engine = model.engine()
    assert answered(engine, [request, *model.requests])[0] == expected
    assert answered(engine, [request])[0] == expected
    assert model.answers([request], step_tokens=7) == [expected]
