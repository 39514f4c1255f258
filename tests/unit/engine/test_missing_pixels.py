"""Requests whose pixels are gone when needed: they are parked, asked for, and go on where they were."""

import random

import pytest
import torch
from helpers.engine_requests import drain, generate, make_engine, prepared, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mmserve.core.messages import PixelsWanted, TokenOutput
from mmserve.engine.scheduler.request import Status

CASE = (5, ("image", 4, 6), 7, ("image", 8, 4), 3)


def bare(request):
    """``request`` as it is sent when the encoder is thought to hold everything."""
    return replace(request, items=tuple(replace(item, pixels=None) for item in request.items))


def pixels_of(request):
    return {item.digest: item.pixels for item in request.items}


def bare_digests(request):
    return frozenset(item.digest for item in request.items if item.pixels is None)


def run(engine, supply, most=3000):
    """Step to the end, answering each call for pixels by ``supply``; the token outputs of each request."""
    outputs, calls = {}, 0
    for _ in range(most):
        for output in engine.step():
            if isinstance(output, PixelsWanted):
                calls += 1
                supply(output)
            else:
                outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        if not engine.has_work and not engine.scheduler.parked:
            return outputs, calls
    raise AssertionError("something never finished")


def pinned(engine):
    return len(engine.stage.pool._held)


def evict(engine, digest):
    """One item's features alone."""
    pool = engine.stage.pool
    others = [(other, entry.features) for other, entry in pool._idle.items() if other != digest]
    pool.clear()
    for other, features in others:
        pool.put(other, features)


def forget_prefixes(engine):
    memory = engine.scheduler.memory
    memory.pages.release(memory.prefixes.clear())


@pytest.fixture(scope="module")
def prompt(pair):
    return pair.prompt(*CASE, seed=3)


@pytest.fixture(scope="module")
def answer(pair, prompt):
    return generate(pair, [prompt])[0]


def test_without_pixels_and_with_features_nothing_is_encoded_again(pair, prompt, answer):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompt, "first"))
    drain(engine)
    assert all(engine.holds(item.digest) for item in prepared(pair, prompt).items)
    engine.submit(bare(prepared(pair, prompt, "again")))
    assert tokens(drain(engine)["again"]) == answer
    assert engine.stats()["encoded_items"] == 2
    assert engine.stats()["pixel_requests"] == 0


def test_evicted_features_are_asked_for_and_the_answer_is_the_same(pair, prompt, answer):
    engine = make_engine(pair)
    whole = prepared(pair, prompt)
    engine.submit(bare(whole))
    wanted = engine.step()
    assert wanted == [PixelsWanted("r", frozenset(pixels_of(whole)))]
    assert not engine.has_work, "the loop may sleep until the pixels come"
    engine.check_integrity()
    assert engine.supply("r", pixels_of(whole)) is None
    assert tokens(drain(engine)["r"]) == answer


def test_only_the_missing_one_of_two_pictures_is_asked_for(pair, prompt, answer):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompt, "first"))
    drain(engine)
    forget_prefixes(engine)
    whole = prepared(pair, prompt)
    lost = whole.items[0].digest
    evict(engine, lost)
    engine.submit(bare(whole))
    assert engine.step() == [PixelsWanted("r", frozenset({lost}))]
    assert engine.supply("r", {lost: pixels_of(whole)[lost]}) is None
    assert tokens(drain(engine)["r"]) == answer
    assert engine.stats()["encoded_items"] == 3


def test_what_is_evicted_while_another_was_asked_for_is_asked_for_in_its_turn(pair, prompt, answer):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompt, "first"))
    drain(engine)
    forget_prefixes(engine)
    whole = prepared(pair, prompt)
    lost, kept = (item.digest for item in whole.items)
    evict(engine, lost)
    engine.submit(bare(whole))
    engine.step()
    evict(engine, kept)
    assert engine.supply("r", {lost: pixels_of(whole)[lost]}) is None
    asked = []

    def supply(wanted):
        asked.append(wanted.digests)
        engine.supply("r", {digest: pixels_of(whole)[digest] for digest in wanted.digests})

    outputs, _ = run(engine, supply)
    assert asked == [frozenset({kept})]
    assert tokens(outputs["r"]) == answer


def test_pictures_whose_keys_and_values_are_cached_are_not_asked_for(pair):
    """A session's window is computed when a new frame is missing: that one alone is decoded again."""
    engine = make_engine(pair, page_size=1)
    whole = prepared(pair, pair.prompt(*CASE, ("image", 6, 6), 2, seed=3))
    *old, new = whole.items
    stop = new.span[0]
    engine.submit(
        replace(
            whole,
            request_id="window",
            token_ids=whole.token_ids[:stop],
            radix_keys=whole.radix_keys[:stop],
            positions=whole.positions[:, :stop],
            items=tuple(old),
        )
    )
    drain(engine)
    engine.stage.pool.clear()
    engine.submit(bare(whole))
    assert engine.step() == [PixelsWanted("r", frozenset({new.digest}))]
    assert engine.supply("r", {new.digest: new.pixels}) is None
    assert tokens(drain(engine)["r"]) == generate(pair, [pair.prompt(*CASE, ("image", 6, 6), 2, seed=3)])[0]


def test_pixels_are_dropped_once_their_features_are_held(pair, prompt):
    engine = make_engine(pair, step_tokens=6)
    engine.submit(prepared(pair, prompt))
    request = engine._requests["r"]
    assert bare_digests(request) == frozenset()
    while not request.num_generated:
        engine.step()
        held = request.items[: request.items_held]
        assert all(item.pixels is None for item in held)
    assert len(bare_digests(request)) == 2
    assert request.prepared.items == ()


@pytest.mark.parametrize("forgotten", [True, False])
def test_preempted_in_mid_answer_and_evicted_no_token_is_lost_or_said_twice(pair, prompt, answer, forgotten):
    """The pixels are asked for again only if the prefix cache has lost the pictures' keys and values too."""
    engine = make_engine(pair)
    whole = prepared(pair, prompt)
    engine.submit(whole)
    outputs = []
    while len(tokens(outputs)) < 5:
        outputs += engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.stage.pool.clear()
    if forgotten:
        forget_prefixes(engine)
    rest, calls = run(engine, lambda wanted: engine.supply(wanted.request_id, pixels_of(whole)))
    assert calls == int(forgotten)
    assert tokens(outputs + rest["r"]) == answer
    assert pinned(engine) == 0


def test_others_go_on_while_one_is_parked(pair, prompt, answer):
    engine = make_engine(pair)
    engine.submit(bare(prepared(pair, pair.prompt(*CASE, seed=8), "parked")))
    engine.submit(prepared(pair, prompt, "other"))
    outputs = drain(engine)
    assert tokens(outputs["other"]) == answer
    assert engine.stats()["parked"] == 1
    assert engine.abort("parked").finish_reason == "abort"
    engine.check_integrity()
    assert engine.stats()["parked"] == 0


def test_a_supply_that_lacks_a_picture_ends_the_request(pair, prompt):
    engine = make_engine(pair)
    whole = prepared(pair, prompt)
    engine.submit(bare(whole))
    engine.step()
    some = dict(list(pixels_of(whole).items())[:1])
    last = engine.supply("r", some)
    assert last.finish_reason == "error"
    assert engine.supply("r", pixels_of(whole)) is None, "it is gone"
    engine.check_integrity()


def test_pictures_that_another_brings_need_not_be_asked_for(pair, prompt, answer):
    engine = make_engine(pair)
    engine.submit(bare(prepared(pair, prompt, "bare")))
    engine.submit(prepared(pair, prompt, "whole"))
    outputs = drain(engine)
    assert tokens(outputs["bare"]) == tokens(outputs["whole"]) == answer
    assert engine.stats()["pixel_requests"] == 0


class FakeEncoder:
    """Features of the right size, of which nobody reads the values."""

    def __init__(self, pair):
        self.merge = pair.vision.merge_size**2
        self.token_bytes = pair.model.vision_token_bytes

    def parts(self, pixels, grids):
        """Two parts, so that everything may happen in the middle."""
        assert all(p is not None for p in pixels)
        yield from (1.0, 1.0)
        return [torch.zeros(h * w // self.merge * self.token_bytes, dtype=torch.uint8) for h, w in grids]


class Arithmetic:
    """Stands where runner and sampler were: the next token is a sum over all that came before it, and the
    features of every item in the batch must be held while it is computed."""

    def __init__(self, engine):
        self.engine = engine

    def run(self, batch):
        for chunk in batch:
            for index, item in enumerate(chunk.request.items):
                if item.span[0] < chunk.stop and chunk.start < item.span[1]:
                    assert self.engine.claims.features(chunk.request, index) is not None
        return torch.zeros(len(batch.sampling), 1)

    def sample(self, logits, requests):
        return [(int(r.token_ids[: r.num_tokens].sum()) % 97, None) for r in requests]

    def forget(self, request):
        pass

    def check_integrity(self, requests):
        pass


def expected(request):
    ids = list(map(int, request.token_ids))
    for _ in range(request.sampling.max_tokens):
        ids.append(sum(ids) % 97)
    return ids[request.num_tokens :]


PICTURES = [("image", 4, 4), ("image", 4, 6), ("image", 8, 4), ("image", 2, 2), ("image", 6, 6)]

arrivals = st.fixed_dictionaries(
    {
        "pictures": st.lists(st.integers(0, len(PICTURES) - 1), max_size=3),
        "text": st.integers(1, 9),
        "answer": st.integers(1, 24),
        "bare": st.booleans(),
        "priority": st.integers(0, 1),
    }
)
events = st.one_of(
    arrivals, st.sampled_from(["step", "supply", "evict"]), st.tuples(st.just("abort"), st.integers(0, 20))
)


class Traffic:
    """A real engine without arithmetic, with a tiny pool of features and few pages, and its callers."""

    def __init__(self, pair, pages, step_tokens, pool_tokens, seed):
        self.pair, self.random = pair, random.Random(seed)
        self.engine = make_engine(pair, step_tokens=step_tokens, encoder_tokens=8, max_running=4, page_size=4)
        self.engine.stage.encoder = FakeEncoder(pair)
        self.engine.stage.pool.capacity_bytes = pool_tokens * pair.model.vision_token_bytes
        self.engine.runner = self.engine.sampler = Arithmetic(self.engine)
        allocator = self.engine.kv.allocator
        allocator.allocate(allocator.free - pages)
        self.pages_taken = allocator.in_use
        self.sent, self.said, self.ended, self.wanted = {}, {}, {}, []

    def arrive(self, pictures, text, answer, bare, priority):
        parts = [part for i in pictures for part in (1, PICTURES[i])]
        prompt = self.pair.prompt(text, *parts, seed=0)
        request = prepared(self.pair, prompt, str(len(self.sent)), priority, max_tokens=answer)
        self.sent[request.request_id] = request
        if bare:
            items = [replace(i, pixels=None) for i in request.items]
            request = replace(request, items=tuple(items))
        self.engine.submit(request)

    def abort(self, number):
        output = self.engine.abort(str(number))
        if output is not None:
            self.ended[output.request_id] = output.finish_reason

    def supply(self):
        """One of those who wait gets its pixels, if it is still there."""
        if self.wanted:
            wanted = self.wanted.pop(self.random.randrange(len(self.wanted)))
            pixels = pixels_of(self.sent[wanted.request_id])
            assert wanted.digests <= pixels.keys()
            assert self.engine.supply(wanted.request_id, {d: pixels[d] for d in wanted.digests}) is None

    def evict(self):
        self.engine.stage.pool.clear()

    def step(self):
        for output in self.engine.step() if self.engine.has_work else ():
            if isinstance(output, PixelsWanted):
                self.wanted.append(output)
                continue
            assert isinstance(output, TokenOutput)
            self.said.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                self.ended[output.request_id] = output.finish_reason
        self.check()

    def check(self):
        engine = self.engine
        engine.stage.pool.check_integrity()
        requests = engine._requests.values()
        pins = {}
        for request in requests:
            for item in request.items[request.items_passed : request.items_held]:
                pins[item.digest] = pins.get(item.digest, 0) + 1
                assert item.pixels is None
            if request.status is not Status.RUNNING:
                assert request.items_held == request.items_passed, "pins of one that does not run"
                assert not request.table.runs
        assert pins == {digest: entry.references for digest, entry in engine.stage.pool._held.items()}
        waiting = {wanted.request_id for wanted in self.wanted} & engine._requests.keys()
        assert len(engine.scheduler.parked) == len(waiting)

    def finish(self, most=5000):
        for _ in range(most):
            if not self.engine._requests:
                break
            self.step()
            if not self.engine.scheduler.has_work or self.random.random() < 0.3:
                self.supply()
        assert not self.engine._requests, "something never finished"
        assert pinned(self.engine) == 0
        cached = self.engine.scheduler.memory.prefixes.pages
        assert self.engine.kv.allocator.in_use - cached == self.pages_taken
        assert self.ended.keys() == self.sent.keys()
        for name, reason in self.ended.items():
            said, whole = self.said.get(name, []), expected(self.sent[name])
            assert said == whole if reason == "length" else said == whole[: len(said)]
            assert reason in ("length", "abort")


@settings(max_examples=120, deadline=None)
@given(
    st.lists(events, max_size=40),
    st.integers(24, 40),
    st.integers(2, 24),
    st.sampled_from([9, 12, 18, 40]),
    st.integers(0, 99),
)
def test_random_traffic_with_a_tiny_pool_finishes_every_request_and_frees_every_pin(
    pair, events, pages, step_tokens, pool_tokens, seed
):
    """Arrivals with and without pixels, late supplies, evictions and aborts in any order."""
    traffic = Traffic(pair, pages, step_tokens, pool_tokens, seed)
    for event in events:
        if isinstance(event, dict):
            traffic.arrive(**event)
        elif isinstance(event, tuple):
            traffic.abort(event[1])
        else:
            getattr(traffic, event)()
        traffic.check()
    traffic.finish()


def test_heavy_traffic_preempts_and_parks_and_still_says_every_token_once(pair):
    parked = preempted = 0
    for seed in range(8):
        traffic = Traffic(pair, pages=26, step_tokens=16, pool_tokens=9, seed=seed)
        choose = traffic.random
        for _ in range(120):
            action = choose.choice(["arrive", "step", "step", "step", "supply", "evict", "abort"])
            if action == "arrive":
                pictures = choose.choices(range(len(PICTURES)), k=choose.randrange(1, 3))
                traffic.arrive(
                    pictures, choose.randint(1, 9), choose.randint(30, 60), choose.random() < 0.5, 0
                )
            elif action == "abort":
                traffic.abort(choose.randrange(100))
            else:
                getattr(traffic, action)()
        traffic.finish()
        parked += traffic.engine.stats()["pixel_requests"]
        preempted += traffic.engine.stats()["preemptions"]
    assert parked > 20
    assert preempted > 20
