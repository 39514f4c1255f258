"""The scheduler with a runner that computes whatever is scheduled, on a clock of its own. No torch."""

import numpy as np

from mmserve.core.config import SchedulerOptions
from mmserve.core.messages import PreparedRequest, SamplingParams, VisionItem
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pages import PageAllocator
from mmserve.engine.kv.radix import RadixCache
from mmserve.engine.scheduler.memory import Memory
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

    def cost(self, item):
        return item.grid[0] * item.grid[1]

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

    def __init__(self, pages=33, cached=True, **options):
        several = options.pop("several_owners", False)
        options = {"step_tokens": 16, "max_running": 4, "max_waiting": 100, **options}
        self.features = FakeFeatures()
        self.memory = Memory(PageAllocator(pages), RadixCache(PAGE_SIZE) if cached else None)
        self.scheduler = Scheduler(SchedulerOptions(**options), self.memory, self.features, several)
        self.requests, self.finished, self.log, self.late = [], [], [], []
        self.now = 0.0

    def submit(self, prompt=8, answer=4, items=(), family=None, **fields):
        """Prompts of one ``family`` begin alike; by default each has its own."""
        family = -1 - len(self.requests) if family is None else family
        return self.take(prepared(prompt, items, family, **fields), answer)

    def take(self, prepared, answer=4):
        """Submit a request as it is; a warm one has no answer."""
        request = Request(
            prepared=prepared,
            arrival=len(self.requests),
            max_tokens=0 if prepared.warm else answer,
            stop_ids=frozenset(),
            table=PageTable(PAGE_SIZE),
            arrived=self.now,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, seconds=0.01):
        """One step of the engine at ``now``, after which ``seconds`` have passed."""
        for request in self.scheduler.passed_deadlines(self.now):
            self.scheduler.finish(request, "error")
            self.late.append(request)
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
        for request in self.scheduler.warmed():
            self.scheduler.finish(request, "stop")
            self.finished.append(request)
        self.scheduler.check_integrity()
        self.now += seconds
        return batch

    def check(self, chunk):
        request = chunk.request
        assert request.status is Status.RUNNING
        assert chunk.start == request.computed_len < chunk.stop <= request.table.capacity
        touched = [i for i in request.items if i.span[0] < chunk.stop and chunk.start < i.span[1]]
        assert all(self.features.references[i.digest] > 0 for i in touched), "computed without its features"

    def drain(self):
        self.drain_queue()
        self.assert_empty()

    def drain_queue(self, most=2000):
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("something never finished")

    def assert_empty(self):
        """Nothing but the prefix cache owns a page, and no item is pinned."""
        assert not any(self.features.references.values())
        if self.memory.prefixes:
            self.memory.pages.release(self.memory.prefixes.clear())
        assert self.memory.pages.in_use == 0


def prepared(prompt, items=(), family=0, **fields):
    tokens = np.arange(prompt, dtype=np.int32)
    return PreparedRequest(
        request_id="r",
        token_ids=tokens,
        radix_keys=tokens.astype(np.int64) + 1000 * family,
        positions=np.tile(tokens, (3, 1)),
        position_delta=0,
        items=tuple(
            VisionItem(digest=bytes([name]), kind="image", grid=(2, 2), span=span, pixels=PIXELS)
            for name, span in items
        ),
        sampling=SamplingParams(),
        **fields,
    )
