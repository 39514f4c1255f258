"""The policy on its own: a fake runner computes whatever is scheduled, and no torch is imported."""

import numpy as np
import pytest
from helpers.scheduler_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mmserve.core.errors import Overloaded
from mmserve.engine.scheduler.request import Status


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_budget():
    world = World()
    world.submit(prompt=10)
    world.step()
    world.submit(prompt=40)
    world.step()
    assert world.log[-1] == [(0, 10, 11), (1, 0, 15)]
    world.step()
    assert world.log[-1] == [(0, 11, 12), (1, 15, 30)]


def test_a_long_prompt_does_not_stop_a_stream_that_is_talking():
    world = World()
    talking = world.submit(prompt=4, answer=20)
    world.step()
    world.submit(prompt=100)
    for _ in range(6):
        before = talking.num_generated
        world.step()
        assert talking.num_generated == before + 1


@pytest.mark.parametrize(
    ("most", "chunk"), [(None, [(1, 0, 15)]), (6, [(1, 0, 6)]), (99, [(1, 0, 15)]), (0, [])]
)
def test_prompts_get_no_more_of_a_step_than_its_caller_grants(most, chunk):
    world = World()
    world.submit(prompt=4)
    world.step()
    world.submit(prompt=40)
    batch = world.scheduler.schedule(prompt_tokens=most)
    assert [(c.request.arrival, c.start, c.stop) for c in batch] == [(0, 4, 5), *chunk]
    assert batch.num_tokens == sum(map(len, batch))


def test_a_chunk_stops_just_before_an_item_that_is_not_encoded():
    world = World()
    request = world.submit(prompt=12, items=[(1, (4, 8))])
    batch = world.scheduler.schedule()
    assert [(c.start, c.stop) for c in batch] == [(0, 4)]
    world.scheduler.advance(batch)
    assert len(world.scheduler.schedule()) == 0
    world.features.encode(request.items[0])
    assert [(c.start, c.stop) for c in world.scheduler.schedule()] == [(4, 12)]


def test_an_item_may_span_two_chunks_and_stays_pinned_between_them():
    world = World(step_tokens=6)
    request = world.submit(prompt=12, items=[(1, (4, 10))])
    world.features.encode(request.items[0])
    world.step()
    assert world.log[-1] == [(0, 0, 6)]
    assert world.features.references[request.items[0].digest] == 1
    world.step()
    assert world.log[-1] == [(0, 6, 12)]
    assert world.features.references[request.items[0].digest] == 0


def test_a_request_waiting_for_its_picture_lets_others_pass():
    world = World()
    world.submit(prompt=8, items=[(1, (0, 4))])
    world.submit(prompt=8)
    assert [(c.request.arrival, c.start, c.stop) for c in world.scheduler.schedule()] == [(1, 0, 8)]


def test_when_pages_run_out_the_youngest_gives_way_and_comes_back():
    world = World(pages=1 + 16, step_tokens=64)
    first, second = world.submit(prompt=12, answer=40), world.submit(prompt=12, answer=40)
    world.drain()
    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert world.finished == [first, second]
    assert second.num_generated == 40


def test_the_more_urgent_waits_less():
    world = World(max_running=1)
    for priority in (5, 0, 5, -1):
        world.submit(priority=priority)
    world.drain()
    assert [r.arrival for r in world.finished] == [3, 1, 0, 2]


def test_a_full_queue_refuses():
    world = World(max_waiting=2)
    world.submit()
    world.submit()
    with pytest.raises(Overloaded):
        world.submit()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_frees_everything_at_once(steps):
    world = World(step_tokens=6)
    request = world.submit(prompt=12, items=[(1, (4, 10))])
    for _ in range(steps):
        world.step()
    world.scheduler.finish(request, "abort")
    world.scheduler.finish(request, "abort")
    world.scheduler.check_integrity()
    assert not world.scheduler.has_work
    world.assert_empty()


# ---------------------------------------------------------------- shared prefixes


def test_a_prompt_that_was_computed_is_not_computed_again():
    world = World()
    world.submit(prompt=10, family=1)
    world.drain_queue()
    again = world.submit(prompt=10, family=1)
    world.step()
    assert world.log[-1] == [(1, 8, 10)]  # whole pages of four are shared
    assert again.cached_len == 8


def test_an_answer_is_part_of_what_the_next_turn_shares():
    world = World()
    first = world.submit(prompt=10, answer=6, family=1)
    world.drain_queue()
    longer = world.submit(prompt=10, family=1)
    longer.prepared = replace(
        longer.prepared, radix_keys=np.concatenate((first.keys(15), np.arange(7, dtype=np.int64)))
    )
    assert world.memory.prefixes.length(longer.prepared.radix_keys) == 12


def test_the_last_token_is_computed_even_if_it_is_cached():
    world = World()
    world.submit(prompt=8, answer=9, family=1)
    world.drain_queue()
    world.submit(prompt=8, family=1)
    world.step()
    assert world.log[-1] == [(1, 4, 8)]


def test_who_comes_while_the_same_is_being_computed_waits_for_it_and_lets_others_pass():
    world = World(step_tokens=64)
    first = world.submit(prompt=33, items=[(1, (16, 20))], family=1)
    world.features.capacity = 0
    world.step()
    follower = world.submit(prompt=34, family=1)
    world.submit(prompt=3)
    world.step()
    assert world.log == [[(0, 0, 16)], [(2, 0, 3)]]
    world.features.capacity = 1
    world.features.encode(first.items[0])
    world.step()
    world.step()
    assert follower.cached_len == 32


def test_two_that_share_little_do_not_wait_for_each_other():
    world = World(step_tokens=8)
    world.submit(prompt=12, family=1)
    other = world.submit(prompt=40, family=1)
    world.step()
    world.step()
    assert other.status is Status.RUNNING


def test_salts_share_nothing():
    world = World()
    world.submit(prompt=10, family=1, cache_salt="a")
    world.drain_queue()
    world.submit(prompt=10, family=1, cache_salt="b")
    world.step()
    assert world.log[-1] == [(1, 0, 10)]


def test_a_step_that_failed_leaves_nothing_to_share():
    world = World()
    request = world.submit(prompt=30, family=1)
    world.step()
    shared = world.memory.prefixes.pages
    world.scheduler.advance(world.scheduler.schedule())
    world.scheduler.finish(request, "error")
    assert world.memory.prefixes.pages <= shared + 3
    world.scheduler.check_integrity()


def test_pictures_of_a_cached_prefix_are_not_encoded_again():
    world = World()
    world.submit(prompt=12, items=[(1, (2, 6))], family=1)
    world.drain_queue()
    world.features.references.clear()
    world.submit(prompt=12, items=[(1, (2, 6))], family=1)
    assert world.scheduler.next_items(100) == []
    world.step()
    assert world.log[-1] == [(1, 8, 12)]


def test_a_picture_that_the_cached_prefix_cuts_is_encoded_and_its_rest_computed():
    world = World()
    world.submit(prompt=7, items=[(1, (2, 6))], family=1)
    world.drain_queue()
    world.features.references.clear()
    longer = world.submit(prompt=12, items=[(1, (2, 6)), (2, (8, 11))], family=1)
    assert [i.digest for i in world.scheduler.next_items(100)] == [i.digest for i in longer.items]
    world.step()
    assert world.log[-1] == [(1, 4, 12)]


def test_cached_prefixes_make_room_for_new_requests():
    world = World(pages=1 + 12)
    for family in range(5):
        world.submit(prompt=20, answer=2, family=family)
    world.drain_queue()
    assert [r.arrival for r in world.finished] == [0, 1, 2, 3, 4]
    assert world.memory.prefixes.pages > 0


def test_who_was_preempted_goes_on_from_what_the_cache_kept():
    world = World(pages=1 + 16, step_tokens=64)
    world.submit(prompt=12, answer=40)
    second = world.submit(prompt=12, answer=40)
    while not second.preemptions:
        world.step()
    kept = world.memory.cached_len(second)
    assert kept > 0
    world.drain()
    assert second.num_generated == 40


def test_what_two_computed_side_by_side_ends_on_the_same_pages():
    """They share too little for one to wait; the pages of it that are there twice are freed."""
    world = World(step_tokens=64)
    short, long = world.submit(prompt=13, answer=9, family=1), world.submit(prompt=40, answer=9, family=1)
    world.step()
    assert world.log == [[(0, 0, 13), (1, 0, 40)]]
    assert short.table.between(0, 3) == long.table.between(0, 3)
    assert world.memory.prefixes.pages == 10
    world.drain()


def test_who_has_waited_for_another_keeps_nothing_of_it():
    world = World(step_tokens=64)
    first = world.submit(prompt=33, items=[(1, (16, 20))], family=1)
    world.features.capacity = 0
    world.step()
    follower = world.submit(prompt=34, family=1)
    world.step()
    assert follower.awaited is first
    world.features.capacity = 1
    while follower.status is Status.WAITING:
        world.step()
    assert follower.awaited is None


arrivals = st.tuples(
    st.integers(1, 30),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4),
    st.integers(0, 1),
    st.sampled_from([None, 1, 2]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(arrivals, st.integers(0, 30), st.just("step")), max_size=40),
    st.integers(1, 24),
    st.integers(14, 40),
    st.integers(1, 6),
    st.booleans(),
)
def test_random_traffic_conserves_pages_and_pins_and_finishes_everything(
    events, step_tokens, pages, max_running, cached
):
    """Arrivals with pictures, aborts and steps in any order; ``World.step`` checks integrity each time."""
    world = World(pages, cached, step_tokens=step_tokens, max_running=max_running)
    for event in events:
        if event == "step":
            world.step()
        elif isinstance(event, int):
            if event < len(world.requests):
                world.scheduler.finish(world.requests[event], "abort")
                world.scheduler.check_integrity()
        else:
            prompt, answer, sizes, priority, family = event
            spans, at = [], 0
            for name, size in sizes:
                if at + size <= prompt:
                    spans.append((name, (at, at + size)))
                    at += size + 1
            world.submit(prompt, answer, spans, family, priority=priority)
    world.drain()
    assert all(r.status is Status.FINISHED for r in world.requests)
    done = [r for r in world.requests if r.finish_reason == "length"]
    assert all(r.num_generated == r.max_tokens for r in done)
    assert set(done) == set(world.finished)
