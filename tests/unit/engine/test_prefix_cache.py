"""The prefix cache on a real engine: it may only change what is computed, never what is said."""

import numpy as np
import pytest
from helpers.engine_requests import drain, generate, make_engine, prepared, tokens
from msgspec.structs import replace

from mmserve.engine.kv.pages import PageAllocator
from mmserve.preprocess.layout import item_keys

CASE = (5, ("image", 4, 6), 7, ("video", 2, 4, 4), 9)


def ask(engine, request):
    """The tokens of ``request`` and how many of its prompt were cached."""
    engine.submit(request)
    [outputs] = drain(engine).values()
    return tokens(outputs), outputs[-1].cached_tokens


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_a_cached_prompt_is_answered_as_a_cold_one(pair, page_size):
    prompt = pair.prompt(*CASE, seed=1)
    [cold] = generate(pair, [prompt], prefix_caching=False)
    engine = make_engine(pair, page_size=page_size)
    assert ask(engine, prepared(pair, prompt)) == (cold, 0)
    encoded = engine.stats()["encoded_items"]
    said, cached = ask(engine, prepared(pair, prompt))
    known = len(prompt.ids) - 1
    assert (said, cached) == (cold, known - known % page_size)
    assert engine.stats()["encoded_items"] == encoded


@pytest.mark.parametrize("kept", [1, 2, 5, 6, 9, 12, 15, 17, 20, 26])
def test_a_prefix_may_end_anywhere_also_inside_a_picture(pair, kept):
    """The first request is aborted when ``kept`` tokens of its prompt are computed."""
    prompt = pair.prompt(3, ("image", 4, 6), 4, ("image", 6, 4), 5, seed=2)
    [cold] = generate(pair, [prompt], prefix_caching=False)
    engine = make_engine(pair, page_size=1, step_tokens=kept)
    engine.submit(prepared(pair, prompt, "first"))
    engine.step()
    engine.abort("first")
    engine.stage.pool.clear()
    said, cached = ask(engine, prepared(pair, prompt))
    assert said == cold
    assert cached == min(kept, len(prompt.ids) - 1)


def test_another_picture_under_the_same_words_is_another_prompt(pair):
    """A, B, A with one text: equal to cold, and B is not answered as A."""
    a = prepared(pair, pair.prompt(4, ("image", 8, 8), 6, seed=3))
    b = recoloured(a)
    cold = [ask(make_engine(pair, prefix_caching=False), r)[0] for r in (a, b, a)]
    engine = make_engine(pair, page_size=1)
    answers = [ask(engine, r) for r in (a, b, a)]
    assert [said for said, _ in answers] == cold
    assert [cached for _, cached in answers] == [0, a.items[0].span[0], a.num_tokens - 1]
    assert cold[0] != cold[1]


def recoloured(request):
    """The same prompt about an inverted picture."""
    [item] = request.items
    digest = bytes(255 - byte for byte in item.digest)
    start, stop = item.span
    keys = request.radix_keys.copy()
    keys[start:stop] = item_keys(digest, stop - start)
    return replace(request, items=(replace(item, pixels=255 - item.pixels, digest=digest),), radix_keys=keys)


def test_two_pictures_in_the_other_order_are_another_prompt(pair):
    prompt = pair.prompt(4, ("image", 4, 4), 1, ("image", 4, 4), 6, seed=4)
    one = prepared(pair, prompt)
    first, second = one.items
    keys = one.radix_keys.copy()
    keys[slice(*first.span)] = item_keys(second.digest, first.span[1] - first.span[0], 0)
    keys[slice(*second.span)] = item_keys(first.digest, second.span[1] - second.span[0], 1)
    other = replace(
        one,
        radix_keys=keys,
        items=(
            replace(first, pixels=second.pixels, digest=second.digest),
            replace(second, pixels=first.pixels, digest=first.digest),
        ),
    )
    cold = [ask(make_engine(pair, prefix_caching=False), r)[0] for r in (one, other)]
    engine = make_engine(pair)
    assert [ask(engine, r)[0] for r in (one, other)] == cold
    assert cold[0] != cold[1]


def test_the_next_turn_shares_the_answer_too(pair):
    engine = make_engine(pair, page_size=4)
    first = prepared(pair, pair.prompt(5, ("image", 4, 6), 7, seed=5), max_tokens=9)
    said, _ = ask(engine, first)
    ids = np.concatenate((first.token_ids, said, [7, 8, 9])).astype(np.int32)
    more = np.arange(first.num_tokens, len(ids)) + first.position_delta
    longer = replace(
        first,
        token_ids=ids,
        radix_keys=np.concatenate((first.radix_keys, ids[first.num_tokens :])),
        positions=np.concatenate((first.positions, np.tile(more, (3, 1))), axis=1).astype(np.int32),
    )
    cold, _ = ask(make_engine(pair, prefix_caching=False), longer)
    warm, cached = ask(engine, longer)
    assert warm == cold
    assert cached == (first.num_tokens + len(said) - 1) // 4 * 4


def test_another_salt_shares_nothing(pair):
    engine = make_engine(pair)
    request = prepared(pair, pair.prompt(40, seed=6))
    assert ask(engine, replace(request, cache_salt="mine"))[1] == 0
    assert ask(engine, replace(request, cache_salt="yours"))[1] == 0
    assert ask(engine, replace(request, cache_salt="mine"))[1] == 32


def test_equal_prompts_at_once_are_computed_once(pair):
    prompt = pair.prompt(*CASE, seed=7)
    [cold] = generate(pair, [prompt], prefix_caching=False)
    engine = make_engine(pair, page_size=4, step_tokens=16)
    for i in range(6):
        engine.submit(prepared(pair, prompt, str(i)))
    outputs = drain(engine)
    assert [tokens(outputs[str(i)]) for i in range(6)] == [cold] * 6
    assert sum(o[-1].cached_tokens >= 16 for o in outputs.values()) == 5


def test_a_pool_too_small_for_the_cache_evicts_and_answers_the_same(pair):
    prompts = [pair.prompt(30, ("image", 4, 4), 3, seed=i) for i in range(8)]
    cold = [generate(pair, [p], prefix_caching=False)[0] for p in prompts]
    engine = make_engine(pair, page_size=4)
    engine.kv.allocator = engine.scheduler.memory.pages = PageAllocator(1 + 28)
    for _ in range(2):
        for prompt, answer in zip(prompts, cold, strict=True):
            assert ask(engine, prepared(pair, prompt))[0] == answer
    assert 0 < engine.scheduler.memory.prefixes.pages <= 28


def test_many_small_pictures_with_and_without_the_cache(pair):
    prompts = [pair.prompt(2, ("image", 2, 2), 2, seed=i) for i in range(60)]
    options = {"max_tokens": 3}
    assert generate(pair, prompts, **options) == generate(pair, prompts, prefix_caching=False, **options)
