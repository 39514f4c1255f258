"""Whose turn it is: owners in fair rotation, deadlines in order, and nobody for ever."""

import itertools

import pytest
from helpers.scheduler_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.errors import Overloaded
from mmserve.engine.scheduler.request import ANSWER_WEIGHT, PATIENCE_S, Status


def order(world):
    """Arrivals in the order in which the queue would serve them."""
    return [request.arrival for request in world.scheduler.waiting]


def served(world, owner):
    """The weight of all tokens computed for ``owner``, counted from its requests."""
    mine = [r for r in world.requests if r.prepared.owner == owner]
    prompts = (r.prompt_len if r.num_generated else r.computed_len for r in mine)
    return sum(prompts) + ANSWER_WEIGHT * sum(r.num_generated for r in mine)


# ---------------------------------------------------------------- between owners


def test_owners_take_turns_by_what_their_requests_cost():
    world = World()
    for owner, prompt in (("a", 30), ("a", 30), ("a", 30), ("b", 10), ("b", 10), ("b", 10), ("b", 10)):
        world.submit(prompt=prompt, owner=owner)
    assert order(world) == [0, 3, 4, 5, 1, 6, 2]


def test_one_request_behind_hundreds_of_another_key_waits_for_the_running_ones_alone():
    world = World(pages=400, max_running=4, max_waiting=1000, step_tokens=64)
    for _ in range(500):
        world.submit(prompt=8, answer=8, owner="heavy")
    for _ in range(30):
        world.step()
    single = world.submit(prompt=8, answer=8, owner="light")
    begun = len(world.log)
    while single.status is Status.WAITING:
        world.step()
    admitted = [arrival for step in world.log[begun:] for arrival, start, _ in step if start == 0]
    assert admitted.index(single.arrival) <= 1


def test_idle_time_earns_no_credit():
    world = World(pages=400, max_running=1, max_waiting=1000)
    for _ in range(40):
        world.submit(owner="busy")
    for _ in range(100):
        world.step()
    for _ in range(40):
        world.submit(owner="back")
    done = len(world.finished)
    while len(world.finished) < done + 21:
        world.step()
    owners = [r.prepared.owner for r in world.finished[done + 1 :]]
    assert abs(owners.count("busy") - owners.count("back")) <= 2


def test_tokens_computed_again_after_a_preemption_are_free():
    world = World(pages=1 + 16, step_tokens=64, cached=False)
    world.submit(prompt=12, answer=40, owner="a")
    second = world.submit(prompt=12, answer=40, owner="b")
    world.drain()
    assert second.preemptions > 0
    assert second.account.served == 12 + 40 * ANSWER_WEIGHT


def test_a_cached_prefix_costs_its_owner_nothing():
    world = World()
    first = world.submit(prompt=10, answer=1, family=1, owner="a")
    world.drain_queue()
    again = world.submit(prompt=10, answer=1, family=1, owner="b")
    before = again.account.served
    world.drain_queue()
    assert first.account.served == 10 + ANSWER_WEIGHT
    assert again.account.served - before == 2 + ANSWER_WEIGHT


def test_who_gives_way_is_the_one_who_was_served_most():
    world = World(pages=1 + 16, step_tokens=64, cached=False)
    earlier = world.submit(prompt=4, answer=2, owner="greedy")
    world.drain_queue()
    world.submit(prompt=12, answer=40, owner="modest")
    world.requests[1].account.served = 0
    greedy = world.submit(prompt=12, answer=40, owner="greedy")
    greedy.account.served = 1000
    world.drain()
    assert earlier.status is Status.FINISHED
    assert (world.requests[1].preemptions, greedy.preemptions > 0) == (0, True)


def test_a_key_alone_does_not_fill_the_queue_of_several():
    world = World(max_waiting=16, several_owners=True)
    for _ in range(8):
        world.submit(owner="a")
    with pytest.raises(Overloaded, match="of this API key"):
        world.submit(owner="a")
    for _ in range(4):
        world.submit(owner="b")
    with pytest.raises(Overloaded, match="of this API key"):
        world.submit(owner="b")
    world.submit(owner="c")


def test_one_key_alone_may_fill_the_queue():
    world = World(max_waiting=16)
    for _ in range(16):
        world.submit()
    with pytest.raises(Overloaded, match="the most this server queues"):
        world.submit()


# ---------------------------------------------------------------- deadlines


def test_among_deadlines_the_earliest_goes_first():
    world = World()
    for deadline in (5.0, 3.0, 4.0):
        world.submit(deadline=deadline)
    assert order(world) == [1, 2, 0]


def test_without_a_deadline_one_is_due_when_its_patience_ends():
    world = World()
    world.submit()
    world.submit(deadline=PATIENCE_S - 1)
    world.submit(deadline=PATIENCE_S + 1)
    assert order(world) == [1, 0, 2]


def test_a_flood_of_deadlines_does_not_starve_who_has_none():
    world = World(pages=400, max_running=1, max_waiting=1000)
    patient = world.submit(prompt=8, answer=8)
    for _ in range(2000):
        if patient.status is Status.FINISHED:
            break
        if len(world.scheduler.waiting) < 3:
            world.submit(prompt=8, answer=8, deadline=world.now + 1)
        world.step(seconds=0.1)
    assert world.now < PATIENCE_S + 5


def test_priority_goes_before_owner_and_owner_before_deadline():
    world = World()
    world.submit(prompt=20, owner="a")
    world.submit(prompt=20, owner="a", deadline=1.0)
    world.submit(prompt=20, owner="b")
    world.submit(prompt=20, owner="b", priority=-1)
    assert order(world) == [3, 1, 2, 0]


def test_a_deadline_that_passes_ends_a_request_that_has_no_token_wherever_it_is():
    world = World(max_running=2, step_tokens=8)
    talking = world.submit(prompt=4, answer=30, deadline=0.5)
    under_way = world.submit(prompt=100, answer=30, deadline=0.5)
    waiting = world.submit(prompt=4, answer=30, deadline=0.5)
    lacking = world.submit(prompt=8, items=[(1, (0, 4))], deadline=0.5, priority=-1)
    lacking.drop_pixels(0)
    world.scheduler.park_lacking()
    world.step()
    assert lacking.status is Status.PARKED
    for _ in range(5):
        world.step(seconds=0.2)
    assert {r.arrival for r in world.late} == {under_way.arrival, waiting.arrival, lacking.arrival}
    assert talking.status is Status.RUNNING
    world.drain()
    assert talking.num_generated == 30


def test_who_has_ended_is_not_kept_for_its_deadline():
    world = World(max_waiting=1000, pages=400)
    for _ in range(300):
        world.submit(answer=1, deadline=1e9)
    world.drain_queue()
    assert not world.scheduler._deadlines._requests
    assert len(world.scheduler._deadlines._order) <= 64


# ---------------------------------------------------------------- pages of decodes


@pytest.mark.parametrize("step_tokens", [2, 64])
def test_every_decode_has_its_page_in_time_though_few_are_looked_at(step_tokens):
    """With a budget below the number of decodes some stand still; ``World.check`` looks at every chunk."""
    world = World(pages=400, max_running=8, step_tokens=step_tokens)
    for prompt in range(3, 11):
        world.submit(prompt=prompt, answer=30)
    world.drain()
    assert len(world.finished) == 8


def test_many_pages_let_a_decode_take_some_ahead_and_few_do_not():
    wide, narrow = World(pages=4000), World(pages=200)
    for world in (wide, narrow):
        world.submit(prompt=8, answer=20)
        world.step()
        world.step()
    assert [w.requests[0].table.num_pages for w in (wide, narrow)] == [2 + 16, 3]


# ---------------------------------------------------------------- properties


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=6),
    st.integers(1, 4),
    st.integers(4, 24),
)
def test_two_who_always_have_requests_waiting_are_served_alike(ones, others, max_running, step_tokens):
    """VTC's bound: whatever their requests look like, what the two were served differs by no more than
    twice the larger of the longest prompt and the answers that may be running, and a prompt under way."""
    world = World(pages=60, cached=False, max_running=max_running, step_tokens=step_tokens)
    shapes = {"a": itertools.cycle(ones), "b": itertools.cycle(others)}
    bound = 2 * max(20, max_running * ANSWER_WEIGHT * 12) + 20
    for _ in range(300):
        for owner, shape in shapes.items():
            waiting = [r for r in world.scheduler.waiting if r.prepared.owner == owner]
            for _ in range(6 - len(waiting)):
                prompt, answer = next(shape)
                world.submit(prompt, answer, owner=owner)
        world.step()
        assert abs(served(world, "a") - served(world, "b")) <= bound
    assert served(world, "a") + served(world, "b") > 300


arrivals = st.tuples(
    st.integers(1, 30),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=3),
    st.integers(0, 1),
    st.sampled_from([None, 1, 2]),
    st.sampled_from("abc"),
    st.one_of(st.none(), st.floats(0.0, 20.0)),
)
ends = st.tuples(st.just("abort"), st.integers(0, 30))
waits = st.tuples(st.just("step"), st.floats(0.001, 3.0))
limits = st.sampled_from([None, 0, 3])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(arrivals, ends, waits), max_size=50),
    st.integers(1, 24),
    st.integers(14, 40),
    st.integers(1, 6),
    st.booleans(),
)
def test_random_owners_deadlines_aborts_and_preemptions_conserve_pages_and_starve_nobody(
    events, step_tokens, pages, max_running, cached
):
    """``World.step`` checks integrity each time; in the end all have answers, or are late or aborted."""
    world = World(pages, cached, step_tokens=step_tokens, max_running=max_running)
    for event in events:
        if event[0] == "step":
            world.step(seconds=event[1])
        elif event[0] == "abort":
            if event[1] < len(world.requests):
                world.scheduler.finish(world.requests[event[1]], "abort")
                world.scheduler.check_integrity()
        else:
            prompt, answer, sizes, priority, family, owner, left = event
            spans, at = [], 0
            for name, size in sizes:
                if at + size <= prompt:
                    spans.append((name, (at, at + size)))
                    at += size + 1
            deadline = None if left is None else world.now + left
            world.submit(prompt, answer, spans, family, priority=priority, owner=owner, deadline=deadline)
    world.drain()
    assert all(r.status is Status.FINISHED for r in world.requests)
    for request in world.late:
        assert request.prepared.deadline <= world.now
        assert request.num_generated == 0
    done = [r for r in world.requests if r.finish_reason == "length"]
    assert all(r.num_generated == r.max_tokens for r in done)
    assert {r.finish_reason for r in world.late} <= {"error"}
