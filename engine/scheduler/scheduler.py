"""Which tokens of which requests the next step computes. No torch, no pictures: arithmetic on queues."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from mmserve.core.config import SchedulerOptions
from mmserve.core.errors import Overloaded
from mmserve.core.messages import FinishReason, VisionItem
from mmserve.engine.scheduler.features import Features
from mmserve.engine.scheduler.memory import Memory
from mmserve.engine.scheduler.request import Batch, Request, Status, common_len

HEADROOM_TOKENS = 32  # room that a new request leaves each running one to grow, lest it be preempted soon


class Scheduler:
    """Continuous batching: one token budget a step, served in the order of ``Request.rank``.

    Pages: a request is admitted when pages for all its known tokens are to be had, and takes them at
    once, so a prefill never stops for want of pages and tends to lie in one run. Only decodes ask for
    more; when there are none, the last request in rank order gives up its own (preemption; the prefix
    cache keeps what it can) and waits again. The first in rank order can always go on, so everything
    finishes.
    """

    def __init__(self, options: SchedulerOptions, memory: Memory, features: Features) -> None:
        self.options = options
        self.memory = memory
        self.features = features
        self.running: list[Request] = []  # in rank order
        self.waiting: list[Request] = []  # in rank order
        self.parked: list[Request] = []  # until their pixels are supplied
        self.preemptions = 0

    # ------------------------------------------------------------ the policy

    def schedule(self, prompt_tokens: int | None = None) -> Batch:
        """The next step: every decode, then chunks of prompts under way, then new requests; these two get
        at most ``prompt_tokens`` of the budget (None: all that the decodes leave, 0: nothing)."""
        batch = Batch(self.options.step_tokens)
        for request in self._decoding():
            if batch.room and self._grow(request):
                batch.add_decode(request)
        if prompt_tokens is not None:
            batch.leave_room(prompt_tokens)
        for request in self._prefilling():
            if batch.room:
                batch.add_prompt(request, self._chunk_stop(request, batch.room))
        while batch.room and (admitted := self._admit()):
            batch.add_prompt(admitted, self._chunk_stop(admitted, batch.room))
        return batch

    def _chunk_stop(self, request: Request, room: int) -> int:
        """As far as the budget goes, and not into an item that is not encoded."""
        self.features.claim(request)
        return min(request.computed_len + room, request.ready_len)

    def _grow(self, request: Request) -> bool:
        """Hold pages for all tokens of ``request``, taken from the last in rank; False if that is itself."""
        while request.status is Status.RUNNING and not self.memory.take(request):
            self._preempt(self.running[-1])
        return request.status is Status.RUNNING

    def _admit(self) -> Request | None:
        """Start the first waiting request, unless what it begins with is being computed by another, if it
        fits and leaves the running ones room to grow."""
        if len(self.running) >= self.options.max_running:
            return None
        request = next((r for r in self.waiting if not self._awaits_prefix(r)), None)
        if request is None:
            return None
        self.memory.share(request)
        if not self._fits(request):
            self.memory.drop(request)
            return None
        self.memory.take(request)
        _remove(self.waiting, request)
        request.begin_at(request.shared_len)
        request.status = Status.RUNNING
        _insert(self.running, request)
        return request

    def _fits(self, request: Request) -> bool:
        needed = request.table.pages_missing(request.num_tokens)
        headroom = len(self.running) * -(-HEADROOM_TOKENS // request.table.page_size)
        return needed + headroom <= self.memory.available

    def _awaits_prefix(self, request: Request) -> bool:
        """Whether more than half of what ``request`` has to compute is being computed for another, which
        will publish it in a few steps."""
        if request.awaited is None or not _prefills(request.awaited):
            request.awaited = None  # lest those who come one after the other keep each other in memory
            others = list(self._prefilling())
            known = request.num_tokens + (self.memory.cached_len(request) if others else 0)
            request.awaited = next((r for r in others if 2 * common_len(r, request) > known), None)
        return request.awaited is not None

    def _preempt(self, request: Request) -> None:
        self._drop(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self._wait(request)

    def next_items(self, tokens: int) -> list[VisionItem]:
        """Items that can be encoded and are not, about ``tokens`` of vision tokens: those of running
        requests in rank order, then those of requests that could be admitted now."""
        wanted: list[VisionItem] = []
        for request in self._soon():
            for item in request.items[request.items_held :]:
                if tokens <= 0:
                    return wanted
                if item.pixels is not None and not self.features.encoded(item):
                    wanted.append(item)
                    tokens -= item.span[1] - item.span[0]
        return wanted

    def park_lacking(self) -> list[Request]:
        """Park the requests soon to be computed that need an item whose features and pixels are both gone.

        To be called after the encoding, which may evict, and before ``schedule``.
        """
        lacking = [request for request in self._soon() if self._lacks(request)]
        for request in lacking:
            self._leave_queue(request)
            request.status = Status.PARKED
            self.parked.append(request)
        return lacking

    def _lacks(self, request: Request) -> bool:
        return any(
            item.pixels is None and not self.features.encoded(item)
            for item in request.items[request.items_held :]
        )

    # ------------------------------------------------------------ requests come and go

    def unpark(self, request: Request) -> None:
        """Queue a parked request again, in its old rank: its pixels are here."""
        self.parked.remove(request)
        request.status = Status.WAITING
        self._wait(request)

    def add(self, request: Request) -> None:
        """Queue a new request; Overloaded when the queue is full."""
        if len(self.waiting) >= self.options.max_waiting:
            raise Overloaded(
                f"{len(self.waiting)} requests are waiting, the most this server queues; try again later"
            )
        self._wait(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Free all that ``request`` holds, whatever its state; once finished, it stays as it is."""
        if request.status is Status.FINISHED:
            return
        self._leave_queue(request, sound=reason != "error")
        request.status = Status.FINISHED
        request.finish_reason = reason

    def advance(self, batch: Batch) -> None:
        """The chunks of ``batch`` were computed. Requests that finished meanwhile are passed over."""
        for chunk in batch:
            if chunk.request.status is Status.RUNNING:
                chunk.request.computed_len = chunk.stop
                self.features.release_computed(chunk.request)
                if len(chunk) > 1:
                    self.memory.publish(chunk.request)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute; parked requests alone are none."""
        return bool(self.running or self.waiting)

    def check_integrity(self) -> None:
        """AssertionError unless every page has one owner and every request is where it belongs."""
        self.memory.check_integrity(self.running)
        assert all(r.status is Status.RUNNING for r in self.running)
        assert all(r.status is Status.WAITING for r in self.waiting)
        assert all(r.status is Status.PARKED for r in self.parked)
        for request in self.waiting + self.parked:
            assert not request.table.runs, "a waiting one holds pages"
            assert request.node is None, "a waiting one holds a prefix"
            assert request.items_held == request.items_passed, "a waiting one holds items"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "a queue out of order"

    # ------------------------------------------------------------ queues

    def _decoding(self) -> Iterator[Request]:
        """Running requests with one token to compute; those preempted on the way are left out."""
        return (r for r in tuple(self.running) if r.decoding and r.status is Status.RUNNING)

    def _prefilling(self) -> Iterator[Request]:
        return (r for r in tuple(self.running) if not r.decoding)

    def _soon(self) -> Iterator[Request]:
        """Requests that have items to come: running ones, and the waiting ones whose pages are free now."""
        yield from [r for r in self.running if r.items_held < len(r.items)]
        free = self.memory.available
        for request in self.waiting:
            free -= request.table.pages_missing(request.num_tokens)
            if free < 0:
                return
            if request.items_held < len(request.items):
                yield request

    # ------------------------------------------------------------ in and out of the queues

    def _wait(self, request: Request) -> None:
        _insert(self.waiting, request)
        request.pass_items(self.memory.cached_len(request))

    def _leave_queue(self, request: Request, sound: bool = True) -> None:
        """Out of whichever queue it is in, and free of all it holds."""
        if request.status is Status.RUNNING:
            self._drop(request, sound)
        elif request.status is Status.WAITING:
            _remove(self.waiting, request)
        else:
            self.parked.remove(request)

    def _drop(self, request: Request, sound: bool = True) -> None:
        """Take from a running request all that it holds; what is ``sound`` of it, others may share."""
        _remove(self.running, request)
        self.memory.drop(request, publish=sound)
        self.features.release(request)
        request.computed_len = 0


def _prefills(request: Request) -> bool:
    return request.status is Status.RUNNING and not request.decoding


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _insert(queue: list[Request], request: Request) -> None:
    insort(queue, request, key=_rank)


def _remove(queue: list[Request], request: Request) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank)]
