"""What a session keeps of its context goes on as it was, unseen by others, and no page is lost."""

import numpy as np
import pytest
from helpers.engine_requests import drain, make_engine, prepared
from helpers.equal_models import TOP, Random, TinyVL, answered, assert_at_rest, renamed, said, with_pages
from helpers.qwen_pairs import Pair
from helpers.sessions import NEW, Oracle, after, carried_over, end_of, moved, order_of, places, trunk
from msgspec.structs import replace

from mmserve.core.errors import ConfigError, InvalidRequest

SAID = 8  # tokens of each answer
FRAMES = (6, ("image", 4, 4), 2, ("image", 4, 4), 3, ("image", 4, 4), 2, ("image", 4, 6), 4)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "tiny-vl"])
def model(request, tmp_path_factory):
    if request.param == "tiny-vl":
        model = TinyVL()
        model.session = model.request("apples.jpg", "circle-rabbit.jpg", "tea.jpg", "What is it?", name="r")
    else:
        pair = Pair(request.param, tmp_path_factory.mktemp("model"))
        model = Random(pair)
        model.session = session(pair)
    model.session = renamed(model.session, "whole", max_tokens=SAID)
    return model


def session(pair):
    return prepared(pair, pair.prompt(*FRAMES, seed=5), logprobs=TOP, max_tokens=SAID)


def window(request, gone=1, **fields):
    """The head and all frames but the first ``gone`` go on; the last words are not part of the trunk."""
    stop = request.num_tokens - 3
    head = request.items[0].span[0] - 1
    return order_of(request, stop, (0, head), (request.items[gone].span[0] - 1, stop), **fields)


def watched(engine, request, order):
    """``engine``, whose cache has the trunk of ``order``."""
    engine.submit(replace(trunk(request, len(order.keys)), cache_salt=order.salt))
    drain(engine)
    return engine


def by_oracle(model, request, order, carried):
    """What is said when of the trunk the first ``carried`` tokens that are kept are as they were."""
    oracle = Oracle(model)
    oracle.compute(request, 0, len(order.keys))
    head = sum(stop - start for start, stop in order.kept[: order.head])
    oracle.keep(places(order)[:carried], head, order.shift)
    return oracle.answer(after(request, order), carried, SAID)


# ---------------------------------------------------------------- what is said afterwards


@pytest.mark.parametrize("page_size", [1, 5])
def test_a_question_after_a_drop_sees_what_was_kept_as_it_was(model, page_size):
    order = window(model.session)
    engine = watched(model.engine(page_size=page_size), model.session, order)
    kept = len(places(order))
    carried = carried_over(engine, order)
    assert carried == kept // page_size * page_size
    [answer] = answered(engine, [after(model.session, order)])
    assert answer.cached == carried
    assert answer == by_oracle(model.model, model.session, order, carried)


def test_what_is_kept_remembers_what_was_dropped(model):
    """Or computing it again would do as well."""
    order = window(model.session)
    engine = watched(model.engine(page_size=1), model.session, order)
    carried_over(engine, order)
    question = after(model.session, order)
    [answer] = answered(engine, [question])
    assert answer.unlike(model.cold(question))


def test_what_is_not_cached_any_more_is_computed_again_behind_what_is(model):
    order = window(model.session)
    engine = watched(model.engine(page_size=1), model.session, order)
    gone = 5
    pages, prefixes = engine.scheduler.memory.pages, engine.scheduler.memory.prefixes
    pages.release(prefixes.evict(gone))
    carried = carried_over(engine, order)
    assert carried == len(places(order)) - gone
    [answer] = answered(engine, [after(model.session, order)])
    assert answer == by_oracle(model.model, model.session, order, carried)


def test_what_was_carried_over_may_be_evicted_and_is_computed_again(model):
    order = window(model.session)
    engine = watched(model.engine(page_size=1), model.session, order)
    carried = carried_over(engine, order)
    prefixes, salt = engine.scheduler.memory.prefixes, (NEW, None)
    question = after(model.session, order)
    engine.scheduler.memory.pages.release(prefixes.evict(len(order.keys) + 4))
    left = prefixes.length(question.radix_keys, salt)
    assert left == carried - 4
    [answer] = answered(engine, [question])
    assert answer == by_oracle(model.model, model.session, order, left)


def test_all_keys_moved_back_are_those_of_a_context_that_began_there(model):
    """The trunk stood at far positions; after the shift it is as one that never did."""
    far = moved(model.session, 100)
    order = order_of(far, far.num_tokens - 3, (0, far.num_tokens - 3), shift=100)
    engine = watched(model.engine(page_size=1), far, order)
    assert carried_over(engine, order) == far.num_tokens - 3
    [answer] = answered(engine, [after(far, order)])
    assert answer.cached == far.num_tokens - 3
    assert answer == model.cold(model.session)


@pytest.mark.parametrize("page_size", [1, 5])
def test_a_head_stays_where_it_is_when_the_rest_moves_back(model, page_size):
    first = model.session.items[0].span[0] - 1
    gap = int(model.session.positions[0, model.session.items[1].span[0] - 1]) - first
    order = window(model.session, shift=gap, head=1)
    engine = watched(model.engine(page_size=page_size), model.session, order)
    carried = carried_over(engine, order)
    question = after(model.session, order)
    assert question.positions[0, : first + 1].tolist() == list(range(first + 1)), "no gap is left"
    [answer] = answered(engine, [question])
    assert answer.cached == carried
    assert answer == by_oracle(model.model, model.session, order, carried)


def test_a_session_drops_and_moves_again_and_again(model):
    """Each time what is kept goes on from where it stood."""
    request, engine, oracle = model.session, model.engine(page_size=1), Oracle(model.model)
    watched(engine, request, window(request))
    oracle.compute(request, 0, request.num_tokens - 3)
    for number, shift in enumerate((0, 1, 2)):
        order = window(request, gone=int(number < 2 and len(request.items) > 2))
        order = replace(order, salt=request.cache_salt, new_salt=f"epoch {number}", shift=shift, head=1)
        assert carried_over(engine, order) == len(places(order))
        oracle.keep(places(order), order.kept[0][1], shift)
        request = after(request, order)
    [answer] = answered(engine, [request])
    assert answer == oracle.answer(request, request.num_tokens - 3, SAID)


# ---------------------------------------------------------------- who sees it


def test_nobody_else_finds_what_was_carried_over(pair):
    request = session(pair)
    order = window(request)
    engine = watched(make_engine(pair, page_size=1), request, order)
    carried_over(engine, order)
    question = after(request, order)
    common = order.kept[0][1] + 1  # the mark that opens a picture is the same of each
    for salt, found in ((None, common), ("another", 0), (NEW + " ", 0), (NEW, len(places(order)))):
        assert engine.scheduler.memory.prefixes.length(question.radix_keys, (salt, None)) == found


def test_an_answer_that_reads_the_old_context_goes_on_undisturbed(model):
    request, order = model.session, window(model.session, retire=True, salt="old")
    request = replace(request, cache_salt="old")
    engine = watched(model.engine(page_size=1), request, order)
    engine.submit(request)
    outputs = []
    while len(outputs) < 2:
        outputs += engine.step()
    assert carried_over(engine, order) == len(places(order))
    engine.submit(after(request, order))
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    heard = {name: [o for o in outputs if o.request_id == name] for name in ("whole", "after")}
    assert said(heard["whole"]) == model.cold(model.session)
    assert said(heard["after"]) == by_oracle(model.model, request, order, len(places(order)))


def test_the_old_context_of_a_session_goes_before_all_others(pair):
    request = replace(session(pair), cache_salt="old")
    order = window(request, salt="old", retire=True)
    engine = make_engine(pair, page_size=1)
    others = prepared(pair, pair.prompt(30, seed=6), "others")
    answered(engine, [others])
    watched(engine, request, order)
    carried_over(engine, order)
    memory = engine.scheduler.memory
    memory.pages.release(memory.prefixes.evict(len(order.keys)))
    assert memory.prefixes.length(order.keys, ("old", None)) == 0
    assert memory.prefixes.length(others.radix_keys) == 30
    assert memory.prefixes.length(after(request, order).radix_keys, (NEW, None)) == len(places(order))
    engine.check_integrity()


def test_a_session_that_ends_gives_up_its_context_first(pair):
    request = replace(prepared(pair, pair.prompt(40, seed=5)), cache_salt="own")
    engine = make_engine(pair, page_size=1)
    others = prepared(pair, pair.prompt(30, seed=6), "others")
    answered(engine, [others, request])
    assert carried_over(engine, order_of(request, 40, salt="own", retire=True)) == 0
    memory = engine.scheduler.memory
    memory.pages.release(memory.prefixes.evict(40))
    assert memory.prefixes.length(others.radix_keys) == 30


# ---------------------------------------------------------------- room


@pytest.mark.parametrize("room", [0, 1, 7])
@pytest.mark.parametrize("page_size", [1, 4])
def test_where_there_is_little_room_a_beginning_is_carried_over(pair, room, page_size):
    """A branch holds the old context, so nothing can be evicted."""
    request = renamed(session(pair), "branch")
    order = window(request)
    pages = -(-(request.num_tokens + SAID) // page_size) + room
    engine = watched(with_pages(make_engine(pair, page_size=page_size), pages), request, order)
    engine.submit(request)
    heard = []
    while not engine.scheduler.decoding:
        heard += engine.step()
    free = engine.scheduler.memory.available
    carried = carried_over(engine, order)
    engine.check_integrity()
    assert carried == min(free, len(places(order)) // page_size) * page_size
    assert said(heard + drain(engine)["branch"]) == cold(pair, request)
    question = after(request, order)
    [answer] = answered(engine, [question])
    assert answer.cached <= len(places(order))
    assert answer == by_oracle(pair.model, request, order, answer.cached)


def cold(pair, request):
    return answered(make_engine(pair, prefix_caching=False), [request])[0]


def test_the_old_context_is_not_evicted_for_the_new_one(pair):
    request = session(pair)
    order = window(request)
    engine = watched(with_pages(make_engine(pair, page_size=1), len(order.keys)), request, order)
    assert carried_over(engine, order) == 0
    assert engine.scheduler.memory.prefixes.length(order.keys) == len(order.keys)
    assert_at_rest(engine)


def test_others_that_nobody_reads_make_room(pair):
    request = session(pair)
    order = window(request)
    kept = len(places(order))
    engine = with_pages(make_engine(pair, page_size=1), len(order.keys) + kept)
    answered(engine, [renamed(prepared(pair, pair.prompt(kept - 4, seed=7)), "others", max_tokens=2)])
    watched(engine, request, order)
    assert engine.scheduler.memory.pages.free < kept
    assert carried_over(engine, order) == kept
    assert engine.scheduler.memory.pages.free == 0
    assert_at_rest(engine)


def test_an_order_carried_out_twice_takes_nothing_more(pair):
    request = session(pair)
    order = window(request)
    engine = watched(make_engine(pair, page_size=1), request, order)
    carried = carried_over(engine, order)
    free = engine.scheduler.memory.pages.free
    assert carried_over(engine, order) == carried
    assert engine.scheduler.memory.pages.free == free
    assert engine.stats()["carried_tokens"] == carried
    assert_at_rest(engine)


def test_what_is_there_already_is_completed(pair):
    request = session(pair)
    order = window(request)
    engine = watched(make_engine(pair, page_size=1), request, order)
    carried = carried_over(engine, order)
    memory = engine.scheduler.memory
    watched(engine, request, order)  # used later than what was carried over, so that goes first
    memory.pages.release(memory.prefixes.evict(6))
    assert carried_over(engine, order) == carried
    assert engine.stats()["carried_tokens"] == carried + 6
    question = after(request, order)
    [answer] = answered(engine, [question])
    assert answer == by_oracle(pair.model, request, order, carried)


def test_of_what_was_never_cached_nothing_is_carried_over(pair):
    request = session(pair)
    engine = make_engine(pair)
    assert carried_over(engine, window(request)) == 0
    assert_at_rest(engine)


def test_a_copy_that_fails_gives_its_pages_back(pair, monkeypatch):
    request = session(pair)
    order = window(request)
    engine = watched(make_engine(pair, page_size=1), request, order)
    monkeypatch.setattr(engine.carrier, "_copy", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        carried_over(engine, order)
    assert_at_rest(engine)
    assert engine.scheduler.memory.prefixes.length(order.keys[places(order)], (NEW, None)) == 0


# ---------------------------------------------------------------- in parts


def test_in_parts_the_same_is_carried_over_while_others_are_answered(model):
    order = window(model.session)
    engine = watched(model.engine(page_size=1), model.session, order)
    engine.carrier.part_pages = 3
    engine.submit(renamed(model.session, "other"))
    parts, outputs, lengths = engine.carrier.carry(order), [], []
    try:
        while True:
            next(parts)
            outputs += engine.step()
            engine.check_integrity()
            new = order.keys[places(order)]
            lengths.append(engine.scheduler.memory.prefixes.length(new, (NEW, None)))
    except StopIteration as end:
        kept = end.value
    assert kept == len(places(order))
    assert lengths == [*range(3, kept, 3), kept]
    assert said(outputs + drain(engine).get("other", [])) == model.cold(model.session)
    [answer] = answered(engine, [after(model.session, order)])
    assert answer == by_oracle(model.model, model.session, order, kept)


@pytest.mark.parametrize("gone", [5, 10_000])
def test_what_is_evicted_between_two_parts_ends_it_and_is_told(pair, gone):
    request = session(pair)
    order = window(request)
    engine = watched(make_engine(pair, page_size=1), request, order)
    engine.carrier.part_pages = 4
    parts, memory = engine.carrier.carry(order), engine.scheduler.memory
    for _ in range(3):
        next(parts)
    memory.pages.release(memory.prefixes.evict(gone))
    carried = end_of(parts)
    assert carried == memory.prefixes.length(order.keys[places(order)], (NEW, None))
    assert carried < len(places(order))
    assert_at_rest(engine)


def test_a_turn_takes_no_longer_than_an_answer_may_wait(pair):
    """With nothing to spare beside an answer it is one part, with nobody there all that a slice allows."""
    request = session(pair)
    order = window(request)
    engine = watched(make_engine(pair, page_size=1, stall_factor=2.0), request, order)
    engine.carrier.part_pages = 4
    engine._clock = lambda: 0.0  # all takes no time
    assert list(engine.carry_over(order)) == []
    engine.submit(renamed(request, "answer"))
    while not engine.scheduler.decoding:
        engine.step()
    engine.mixing.decode.seconds = 0.0
    turns = list(engine.carry_over(replace(order, new_salt="another")))
    assert len(turns) == -(-len(places(order)) // 4)
    assert engine.stats()["decode_waits"] > len(turns)


# ---------------------------------------------------------------- refusals

WRONG = {
    "kept": {"kept": ((4, 9), (8, 12))},
    "new_salt": {"new_salt": "old", "salt": "old"},
    "shift": {"shift": -1},
    "head": {"head": 3},
    "retire": {"retire": True},
}


@pytest.mark.parametrize("field", WRONG)
def test_an_order_that_contradicts_itself_is_refused_by_name(pair, field):
    engine = make_engine(pair)
    order = order_of(prepared(pair, pair.prompt(20, seed=1)), 20, (0, 4), (8, 12))
    with pytest.raises(InvalidRequest) as error:
        carried_over(engine, replace(order, **WRONG[field]))
    assert error.value.param == field


@pytest.mark.parametrize("kept", [((3, 2),), ((0, 21),), ((-1, 4),)])
def test_ranges_that_are_none_are_refused(pair, kept):
    order = order_of(prepared(pair, pair.prompt(20, seed=1)), 20, *kept)
    with pytest.raises(InvalidRequest, match="20 tokens"):
        carried_over(make_engine(pair), order)


def test_without_a_prefix_cache_there_is_nothing_to_carry_over(pair):
    order = order_of(prepared(pair, pair.prompt(20, seed=1)), 20, (0, 4))
    with pytest.raises(ConfigError) as error:
        carried_over(make_engine(pair, prefix_caching=False), order)
    assert error.value.param == "prefix_caching"


def test_ranges_are_cut_by_tokens_whatever_the_pages(pair):
    """Of every third token only, in pages of five."""
    request = prepared(pair, pair.prompt(60, seed=8), max_tokens=SAID, logprobs=TOP)
    order = order_of(request, 57, *((place, place + 1) for place in range(0, 57, 3)))
    engine = watched(make_engine(pair, page_size=5), request, order)
    assert carried_over(engine, order) == 15
    [answer] = answered(engine, [after(request, order)])
    assert answer == by_oracle(pair.model, request, order, 15)
    assert np.all(places(order) == np.arange(0, 57, 3))
