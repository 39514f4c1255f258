"""Contexts that are computed before anybody asks: nothing said differs, and nothing is computed twice."""

import time

import pytest
from helpers.engine_requests import drain, make_engine, prepared, tokens
from helpers.equal_models import Random, TinyVL, answered, assert_at_rest, renamed, said, with_pages
from helpers.qwen_pairs import Pair
from helpers.scheduler_world import World
from helpers.sessions import stages, trunk
from msgspec.structs import replace

from mmserve.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from mmserve.core.messages import Grammar, PixelsWanted, SamplingParams

CASE = (5, ("image", 4, 6), 7, ("image", 8, 4), 9)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "tiny-vl"])
def model(request, tmp_path_factory):
    if request.param == "tiny-vl":
        return TinyVL()
    return Random(Pair(request.param, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def whole(pair):
    return prepared(pair, pair.prompt(*CASE, seed=1))


def ended(outputs):
    """Of one warm request: (reason, tokens said, tokens concerned, those cached before)."""
    [last] = outputs
    return last.finish_reason, last.token_ids, last.prompt_tokens, last.cached_tokens


# ---------------------------------------------------------------- what is said


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_question_behind_a_warm_context_is_answered_as_all_of_it_at_once(model, page_size):
    for request in model.requests:
        engine = model.engine(page_size=page_size)
        for stop in stages(request):
            engine.submit(trunk(request, stop))
            drain(engine)
        [answer] = answered(engine, [request])
        assert answer == model.cold(request)
        assert answer.cached == stages(request)[-1] // page_size * page_size


def test_a_context_that_grows_during_an_answer_does_not_disturb_it(model):
    """The question comes at each stage of the trunk, and what the trunk has yet to get comes meanwhile."""
    request = max(model.requests, key=lambda r: len(r.items))
    for stop in stages(request):
        early = replace(trunk(request, stop, "early"), warm=False, sampling=request.sampling)
        early = replace(early, position_delta=int(early.positions.max()) + 1 - stop)
        engine = model.engine(page_size=1)
        engine.submit(early)
        heard = []
        for number, later in enumerate(stages(request)):
            heard += engine.step()
            engine.submit(trunk(request, later, f"trunk {number}"))
        heard = [output for output in heard if output.request_id == "early"] + drain(engine)["early"]
        assert said(heard) == model.cold(early)
        [answer] = answered(engine, [request])
        assert answer == model.cold(request)
        assert answer.cached == stages(request)[-1]


# ---------------------------------------------------------------- what is computed


def test_what_is_cached_already_ends_in_one_step_without_computing(pair, whole):
    engine = make_engine(pair, page_size=1)
    stop = whole.num_tokens
    engine.submit(trunk(whole, stop, "first"))
    assert ended(drain(engine)["first"]) == ("stop", (), stop, 0)
    steps = engine.stats()["steps"]
    engine.submit(trunk(whole, stop, "again"))
    assert [output.request_id for output in engine.step()] == ["again"]
    assert not engine.has_work
    assert engine.stats()["steps"] == steps
    assert engine.stats()["warmed"] == 2
    assert_at_rest(engine)


def test_it_ends_beside_answers_that_go_on(pair, whole):
    engine = make_engine(pair, page_size=1)
    engine.submit(renamed(whole, "talking", max_tokens=40))
    while not engine.scheduler.decoding:
        engine.step()
    engine.submit(trunk(whole, whole.num_tokens, "warm"))
    heard = [output for _ in range(4) for output in engine.step()]
    assert [o.finish_reason for o in heard if o.request_id == "warm"] == ["stop"]
    assert sum(o.request_id == "talking" for o in heard) == 4
    drain(engine)


def test_only_whole_pages_are_computed_since_others_are_not_shared(pair):
    engine = make_engine(pair, page_size=16)
    request = prepared(pair, pair.prompt(60, seed=2))
    for stop, kept, before in ((15, 0, 0), (40, 32, 0), (47, 32, 32), (48, 48, 32)):
        engine.submit(trunk(request, stop))
        assert ended(drain(engine)["trunk"]) == ("stop", (), kept, before)


def test_a_picture_in_the_part_of_a_page_at_the_end_is_encoded_too(pair):
    """Its tokens are computed again with the question; the picture is not encoded again."""
    request = prepared(pair, pair.prompt(16, ("image", 4, 4), 2, seed=3))
    assert request.items[0].span == (17, 21)
    engine = make_engine(pair, page_size=16)
    engine.submit(trunk(request, 22))
    drain(engine)
    assert engine.holds(request.items[0].digest)
    [answer] = answered(engine, [replace(request, items=(replace(request.items[0], pixels=None),))])
    assert answer.cached == 16
    assert engine.stats()["encoded_items"] == 1


def test_a_picture_that_ends_behind_the_last_whole_page_is_computed_up_to_there(pair):
    request = prepared(pair, pair.prompt(10, ("image", 8, 8), 2, seed=3))
    assert request.items[0].span == (11, 27)
    engine = make_engine(pair, page_size=16)
    for cached in (0, 16):
        engine.submit(trunk(request, 28))
        assert ended(drain(engine)["trunk"]) == ("stop", (), 16, cached)
    [answer] = answered(engine, [renamed(request, "asks")])
    assert (answer.tokens, answer.cached) == (tokens(generated(pair, request)), 16)


def generated(pair, request):
    engine = make_engine(pair, prefix_caching=False)
    engine.submit(request)
    return drain(engine)[request.request_id]


def test_no_logits_are_computed(pair, whole, monkeypatch):
    engine = make_engine(pair, page_size=1)
    run, rows = engine.runner.run, []
    monkeypatch.setattr(engine.runner, "run", lambda batch: rows.append(len(run(batch))) or run(batch))
    engine.submit(trunk(whole, whole.num_tokens))
    drain(engine)
    assert rows
    assert not any(rows)


def test_those_of_one_session_follow_one_another_and_nothing_is_computed_twice():
    """Each is what the one before is and a frame more; all are sent at once."""
    world = World(step_tokens=16, max_running=8)
    for length in range(8, 88, 8):
        world.submit(prompt=length, family=1, warm=True)
    world.drain_queue()
    assert sum(stop - start for step in world.log for _, start, stop in step) == 80
    assert [r.arrival for r in world.finished] == list(range(10))


def test_a_question_waits_for_the_frame_that_is_being_computed_and_pays_for_itself_alone():
    world = World(pages=65, step_tokens=16)
    world.submit(prompt=40, family=1, warm=True)
    world.step()
    asks = world.submit(prompt=90, family=1)
    world.drain_queue()
    assert asks.cached_len == 40


def test_who_begins_a_little_like_a_long_prompt_does_not_wait_for_it():
    """It is long in coming: a picture of it is not encoded yet."""
    world = World(pages=65, step_tokens=32)
    world.submit(prompt=100, family=1, items=[(1, (8, 20))], warm=True)
    world.scheduler.advance(world.scheduler.schedule())
    other = world.submit(prompt=20, family=1, warm=True)
    other.prepared.radix_keys[12:] += 5000
    assert [(c.request, c.start, c.stop) for c in world.scheduler.schedule()] == [(other, 8, 20)]


def test_a_warm_context_takes_no_more_of_a_step_than_a_prompt():
    """The chunks that others' answers see between their tokens."""
    assert chunks_beside_an_answer(warm=True) == chunks_beside_an_answer(warm=False) == [6] * 9


def chunks_beside_an_answer(warm):
    world = World(step_tokens=32)
    talking = world.submit(prompt=4, answer=30)
    world.step()
    world.submit(prompt=60, warm=warm)
    sizes = []
    for _ in range(9):
        batch = world.scheduler.schedule(prompt_tokens=6)
        world.scheduler.advance(batch)
        talking.append(7)
        sizes += map(len, batch.prompts)
    return sizes


# ---------------------------------------------------------------- refusals and ends


def test_without_a_prefix_cache_it_is_refused_and_takes_nothing(pair, whole):
    engine = make_engine(pair, prefix_caching=False)
    with pytest.raises(ConfigError) as error:
        engine.submit(trunk(whole, whole.num_tokens))
    assert error.value.param == "prefix_caching"
    assert not engine.has_work


def test_it_may_fill_the_context_and_no_more(pair):
    engine = make_engine(pair, max_model_len=64, page_size=1)
    request = prepared(pair, pair.prompt(65, seed=4))
    engine.submit(trunk(request, 64))
    assert ended(drain(engine)["trunk"]) == ("stop", (), 64, 0)
    with pytest.raises(ContextLengthExceeded, match="65 tokens"):
        engine.submit(trunk(request, 65))


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"grammar": Grammar("regex", "a")}])
def test_what_is_part_of_an_answer_is_refused_by_name(pair, whole, asked):
    engine = make_engine(pair)
    with pytest.raises(InvalidRequest) as error:
        engine.submit(replace(trunk(whole, 20), sampling=SamplingParams(**asked)))
    assert error.value.param == next(iter(asked))


def test_a_deadline_that_passes_first_ends_it(pair, whole):
    engine = make_engine(pair)
    engine.submit(replace(trunk(whole, 20), deadline=time.monotonic() - 1))
    [output] = drain(engine)["trunk"]
    assert output.error_code == "deadline_exceeded"


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_frees_everything_and_what_was_computed_stays_for_others(pair, whole, steps):
    engine = make_engine(pair, page_size=1, step_tokens=8)
    engine.submit(trunk(whole, whole.num_tokens))
    for _ in range(steps):
        engine.step()
    engine.abort("trunk")
    assert_at_rest(engine)
    [answer] = answered(engine, [whole])
    assert answer.tokens == tokens(generated(pair, whole))


def test_evicted_features_are_asked_for(pair, whole):
    engine = make_engine(pair, page_size=1)
    bare = tuple(replace(item, pixels=None) for item in whole.items)
    engine.submit(replace(trunk(whole, whole.num_tokens), items=bare))
    [wanted] = engine.step()
    assert wanted == PixelsWanted("trunk", frozenset(item.digest for item in bare))
    assert engine.supply("trunk", {item.digest: item.pixels for item in whole.items}) is None
    assert ended(drain(engine)["trunk"])[0] == "stop"


def test_where_pages_are_few_it_gives_way_and_comes_back(pair):
    """Answers take the pages that it has, and it is computed when they are done."""
    engine = with_pages(make_engine(pair, page_size=1, step_tokens=4), 70)
    for number in range(2):
        engine.submit(prepared(pair, pair.prompt(12, seed=number), str(number), max_tokens=20))
    heard = [output for _ in range(8) for output in engine.step()]
    engine.submit(replace(trunk(prepared(pair, pair.prompt(40, seed=9)), 40), priority=1))
    outputs = drain(engine)
    assert ended(outputs["trunk"])[:3] == ("stop", (), 40)
    for name in "01":
        early = [output for output in heard if output.request_id == name]
        assert len(tokens(early + outputs[name])) == 20
