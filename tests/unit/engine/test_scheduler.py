"""The policy on its own: a fake runner computes whatever is scheduled, and no torch is imported."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.config import SchedulerOptions
from mmserve.core.errors import Overloaded
from mmserve.core.messages import PreparedRequest, SamplingParams, VisionItem
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pages import PageAllocator
from mmserve.engine.scheduler.request import Request, Status
from mmserve.engine.scheduler.scheduler import Scheduler

PAGE_SIZE = 4
PIXELS = np.zeros((1, 4, 4, 3), np.uint8)


class FakeFeatures:
    """An encoder pool of a few items; ``encode`` puts them there, evicting what nobody holds."""

    def __init__(self, capacity=8):
        self.capacity, self.references = capacity, {}

    def encode(self, item):
        idle = [d for d, n in self.references.items() if n == 0]
        if len(self.references) == self.capacity and idle:
            del self.references[idle[0]]
        if len(self.references) < self.capacity:
            self.references.setdefault(item.digest, 0)

    def encoded(self, item):
        return item.digest in self.references

    def claim(self, request):
        items = request.items
        while request.items_held < len(items) and self.encoded(items[request.items_held]):
            self.references[items[request.items_held].digest] += 1
            request.items_held += 1
        waits = request.items_held < len(items)
        request.ready_len = items[request.items_held].span[0] if waits else request.num_tokens

    def release_computed(self, request):
        while (
            request.items_passed < request.items_held
            and request.items[request.items_passed].span[1] <= request.computed_len
        ):
            self._unpin(request)

    def release(self, request):
        while request.items_passed < request.items_held:
            self._unpin(request)
        request.items_passed = request.items_held = 0

    def _unpin(self, request):
        self.references[request.items[request.items_passed].digest] -= 1
        request.items_passed += 1


class World:
    """A scheduler, and a runner that samples token 7 for whoever is due one."""

    def __init__(self, pages=33, **options):
        options = {"step_tokens": 16, "max_running": 4, "max_waiting": 100, **options}
        self.features = FakeFeatures()
        self.scheduler = Scheduler(SchedulerOptions(**options), PageAllocator(pages), self.features)
        self.requests, self.finished, self.log = [], [], []

    def submit(self, prompt=8, answer=4, items=(), priority=0):
        request = Request(
            prepared(prompt, items, priority), len(self.requests), answer, frozenset(), PageTable(PAGE_SIZE)
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self):
        for item in self.scheduler.next_items(8):
            self.features.encode(item)
        batch = self.scheduler.schedule()
        self.log.append([(c.request.arrival, c.start, c.stop) for c in batch])
        for chunk in batch:
            self.check(chunk)
        self.scheduler.advance(batch)
        for chunk in batch:
            if chunk.samples:
                chunk.request.append(7)
                if chunk.request.finish_reason:
                    self.scheduler.finish(chunk.request, chunk.request.finish_reason)
                    self.finished.append(chunk.request)
        self.scheduler.check_integrity()
        return batch

    def check(self, chunk):
        request = chunk.request
        assert request.status is Status.RUNNING
        assert chunk.start == request.computed_len < chunk.stop <= request.table.capacity
        touched = [i for i in request.items if i.span[0] < chunk.stop and chunk.start < i.span[1]]
        assert all(self.features.references[i.digest] > 0 for i in touched), "computed without its features"

    def drain(self, most=2000):
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "something never finished"
        assert self.scheduler.pages.in_use == 0
        assert not any(self.features.references.values())


def prepared(prompt, items=(), priority=0):
    tokens = np.arange(prompt, dtype=np.int32)
    return PreparedRequest(
        request_id="r",
        token_ids=tokens,
        radix_keys=tokens.astype(np.int64),
        positions=np.tile(tokens, (3, 1)),
        position_delta=0,
        items=tuple(
            VisionItem(digest=bytes([name]), kind="image", grid=(2, 2), span=span, pixels=PIXELS)
            for name, span in items
        ),
        sampling=SamplingParams(),
        priority=priority,
    )


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
    assert world.scheduler.pages.in_use == 0
    assert not any(world.features.references.values())
    assert not world.scheduler.has_work


arrivals = st.tuples(
    st.integers(1, 30),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4),
    st.integers(0, 1),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(arrivals, st.integers(0, 30), st.just("step")), max_size=40),
    st.integers(1, 24),
    st.integers(14, 40),
    st.integers(1, 6),
)
def test_random_traffic_conserves_pages_and_pins_and_finishes_everything(
    events, step_tokens, pages, max_running
):
    """Arrivals with pictures, aborts and steps in any order; ``World.step`` checks integrity each time."""
    world = World(pages=pages, step_tokens=step_tokens, max_running=max_running)
    for event in events:
        if event == "step":
            world.step()
        elif isinstance(event, int):
            if event < len(world.requests):
                world.scheduler.finish(world.requests[event], "abort")
                world.scheduler.check_integrity()
        else:
            prompt, answer, sizes, priority = event
            spans, at = [], 0
            for name, size in sizes:
                if at + size <= prompt:
                    spans.append((name, (at, at + size)))
                    at += size + 1
            world.submit(prompt, answer, spans, priority)
    world.drain()
    assert all(r.status is Status.FINISHED for r in world.requests)
    done = [r for r in world.requests if r.finish_reason == "length"]
    assert all(r.num_generated == r.max_tokens for r in done)
    assert set(done) == set(world.finished)
