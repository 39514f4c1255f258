"""Which tokens of which requests the next step computes. No torch, no pictures: arithmetic on queues."""

from collections.abc import Iterator
from itertools import islice

from mmserve.core.config import SchedulerOptions
from mmserve.core.messages import FinishReason, VisionItem
from mmserve.engine.scheduler.deadlines import Deadlines
from mmserve.engine.scheduler.features import Features
from mmserve.engine.scheduler.growth import Growth
from mmserve.engine.scheduler.memory import Memory
from mmserve.engine.scheduler.request import Batch, Request, Status, common_len
from mmserve.engine.scheduler.waiting import WaitingQueue

HEADROOM_TOKENS = 32  # room that a new request leaves each running one to grow, lest it be preempted soon
AHEAD = 32  # waiting requests that are looked at before their time: a step costs no more for a long queue


class Scheduler:
    """Continuous batching: one token budget a step, served in the order of ``Request.rank``.

    Pages: a request is admitted when pages for all its known tokens are to be had, and takes them at
    once, so a prefill never stops for want of pages and tends to lie in one run. Only decodes ask for
    more; when there are none, the last request in rank order gives up its own (preemption; the prefix
    cache keeps what it can) and waits again. That is never the first in rank order while another runs,
    and one alone has room: so the first can always go on. Its owner's rank falls only by tokens computed,
    while those who wait keep theirs: so everything finishes.

    Steps in flight (``drawing``, see runner/overlap.py): a step counts as computed once it is launched, for
    whatever is launched later comes behind it on the device. Of the tokens drawn in it the number is known
    and the values are not, which matters to prefixes alone: those are asked about tokens behind which a later
    one has been launched, or of requests that wait, which are not admitted before all is known.

    Cost: a decode is looked at when it begins, when its pages are used up, and when it ends; between
    these it is in ``decoding``, and a step takes that list as it is.
    """

    def __init__(
        self, options: SchedulerOptions, memory: Memory, features: Features, several_owners: bool = False
    ) -> None:
        self.options = options
        self.memory = memory
        self.features = features
        self.decoding: list[Request] = []  # running: only the newest token is left to compute
        self.prefilling: list[Request] = []  # running: more is
        self.ending: list[Request] = []  # running: the last token is being drawn in a step in flight
        self.waiting = WaitingQueue(options.max_waiting, several_owners)
        self.parked: list[Request] = []  # until their pixels are supplied
        self.preemptions = 0
        self._growth = Growth()
        self._deadlines = Deadlines()
        self._next: list[Request] | None = None  # the first of ``waiting``; None once that has changed

    # ------------------------------------------------------------ the policy

    def schedule(self, prompt_tokens: int | None = None) -> Batch:
        """The next step: every decode, then chunks of prompts under way, then new requests; these two get
        at most ``prompt_tokens`` of the budget (None: all that the decodes leave, 0: nothing)."""
        self._grow_decodes()
        batch = Batch(self.options.step_tokens)
        batch.add_decodes(self.decoding)
        if prompt_tokens is not None:
            batch.leave_room(prompt_tokens)
        for request in sorted(self.prefilling, key=_rank):
            if batch.room:
                batch.add_prompt(request, self._chunk_stop(request, batch.room))
        while batch.room and (admitted := self._admit()):
            batch.add_prompt(admitted, self._chunk_stop(admitted, batch.room))
        return batch

    def _grow_decodes(self) -> None:
        """Pages for the newest token of every decode, taken from the last in rank when there are none."""
        for request in self._growth.next_step():
            while request.status is Status.RUNNING and not self.memory.grow(request):
                self._preempt(max(self.running, key=_rank))
            if request.status is Status.RUNNING:
                request.pay()
                self._growth.watch(request)

    def _chunk_stop(self, request: Request, room: int) -> int:
        """As far as the budget goes, and not into an item that is not encoded."""
        self.features.claim(request)
        return min(request.computed_len + room, request.ready_len)

    def _admit(self) -> Request | None:
        """Start the first waiting request, unless what it begins with is being computed by another, if it
        fits and leaves the running ones room to grow. Its owner pays for the prompt at once."""
        if not self.waiting or self.num_running >= self.options.max_running:
            return None
        ready = (r for r in islice(self.waiting, AHEAD) if not r.unknown and not self._awaits_prefix(r))
        request = next(ready, None)
        if request is None:
            return None
        self.memory.share(request)
        if not self._fits(request):
            self.memory.drop(request)
            return None
        self.memory.take(request)
        self._leave_queue(request)
        request.begin_at(request.shared_len)
        request.pay()
        request.status = Status.RUNNING
        self.prefilling.append(request)
        return request

    def _fits(self, request: Request) -> bool:
        needed = request.table.pages_missing(request.num_tokens)
        headroom = self.num_running * -(-HEADROOM_TOKENS // request.table.page_size)
        return needed + headroom <= self.memory.available

    def _awaits_prefix(self, request: Request) -> bool:
        """Whether what ``request`` has to compute is being computed for another, which will publish it in a
        few steps."""
        if request.awaited is None or not _prefills(request.awaited):
            request.awaited = None  # lest those who come one after the other keep each other in memory
            cached = self.memory.cached_len(request) if self.prefilling else 0
            others = (r for r in self.prefilling if _worth_awaiting(r, request, cached))
            request.awaited = next(others, None)
        return request.awaited is not None

    def _preempt(self, request: Request) -> None:
        request.pay()
        self._drop(request)
        request.preemptions += 1
        self.preemptions += 1
        self._wait(request)

    def next_items(self, tokens: int) -> list[VisionItem]:
        """Items that can be encoded and are not, about ``tokens`` of vision tokens: those of running
        requests in rank order, then those of the next requests that could be admitted now."""
        wanted: list[VisionItem] = []
        for request in self._soon():
            for item in request.items[request.items_held :]:
                if tokens <= 0:
                    return wanted
                if item.pixels is not None and not self.features.encoded(item):
                    wanted.append(item)
                    tokens -= self.features.cost(item)
        return wanted

    def park_lacking(self) -> list[Request]:
        """Park the requests soon to be computed that need an item whose features and pixels are both gone;
        ``Request.wanted`` tells which. What is evicted meanwhile parks it once more.

        To be called after the encoding, which may evict, and before ``schedule``.
        """
        lacking = [(request, wanted) for request in self._soon() if (wanted := self._lacked(request))]
        for request, wanted in lacking:
            self._leave_queue(request)
            request.status, request.wanted = Status.PARKED, wanted
            self.parked.append(request)
        return [request for request, _ in lacking]

    def _lacked(self, request: Request) -> frozenset[bytes]:
        return frozenset(
            item.digest
            for item in request.items[request.items_held :]
            if item.pixels is None and not self.features.encoded(item)
        )

    # ------------------------------------------------------------ requests come and go

    def unpark(self, request: Request) -> None:
        """Queue a parked request again, in its old rank: its pixels are here."""
        self.parked.remove(request)
        self._wait(request)

    def add(self, request: Request) -> None:
        """Queue a new request; Overloaded when the queue is full, or its owner's share of it."""
        self.waiting.check_room(request)
        self._deadlines.add(request)
        self._wait(request)

    def passed_deadlines(self, now: float) -> list[Request]:
        """Requests whose deadline passed before their first token, told once; the caller finishes them.
        ``now`` is on the clock of the deadlines."""
        return self._deadlines.passed(now)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Free all that ``request`` holds, whatever its state; once finished, it stays as it is."""
        if request.status is Status.FINISHED:
            return
        self._deadlines.remove(request)
        if request.status is Status.RUNNING:
            request.pay()
        self._leave_queue(request, sound=reason != "error")
        request.status = Status.FINISHED
        request.finish_reason = reason

    def advance(self, batch: Batch) -> None:
        """The chunks of ``batch`` were computed. Requests that finished meanwhile are passed over."""
        for chunk in batch.prompts:
            request = chunk.request
            if request.status is Status.RUNNING:
                request.computed_len = chunk.stop
                self.features.release_computed(request)
                self.memory.publish(request)
                if chunk.samples:
                    self._begin_decoding(request)

    def drawing(self, requests: list[Request]) -> None:
        """A token is being drawn for each of ``requests``, and nobody knows it yet. Who thereby has all it
        may say has nothing more to compute, and keeps its pages until it is finished."""
        for request in requests:
            request.reach()
            if request.num_generated == request.max_tokens:
                self.decoding.remove(request)
                self.ending.append(request)
                request.full_at = 0

    @property
    def tight(self) -> bool:
        """Whether the next step may have to take pages from a running request."""
        return self._growth.coming > self.memory.available

    def warmed(self) -> list[Request]:
        """Warm requests of which all is computed, or was before they came; the caller finishes them."""
        return [request for request in self.prefilling if request.computed_len == request.num_tokens]

    def _begin_decoding(self, request: Request) -> None:
        self.prefilling.remove(request)
        self.decoding.append(request)
        self._growth.watch(request)

    @property
    def running(self) -> list[Request]:
        return self.decoding + self.prefilling + self.ending

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.ending)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute; parked requests alone are none."""
        return bool(self.decoding or self.prefilling or self.waiting or self.ending)

    def check_integrity(self) -> None:
        """AssertionError unless every page has one owner and every request is where it belongs."""
        self.memory.check_integrity(self.running)
        self.waiting.check_integrity()
        self._growth.check_integrity(self.decoding)
        assert all(r.status is Status.RUNNING for r in self.running)
        assert all(r.status is Status.WAITING for r in self.waiting)
        assert all(r.status is Status.PARKED for r in self.parked)
        assert all(r.decoding for r in self.decoding), "a prompt among the decodes"
        # (one that begins again after a preemption is at its last token now and then, as a chunk ends there)
        assert not any(r.decoding for r in self.prefilling if not r.preemptions), "a decode among the prompts"
        assert not any(r.unknown for r in self.prefilling), "a prompt with tokens that nobody knows"
        assert all(r.unknown for r in self.ending), "one at its end that is not in flight"
        assert all(r.items_held == len(r.items) for r in self.decoding), "a decode that needs a picture"
        for request in (*self.waiting, *self.parked):
            assert not request.table.runs, "a waiting one holds pages"
            assert request.node is None, "a waiting one holds a prefix"
            assert request.items_held == request.items_passed, "a waiting one holds items"

    # ------------------------------------------------------------ who may have items to come

    def _soon(self) -> Iterator[Request]:
        """Requests with items to come: running ones, and the next waiting ones whose pages are free now."""
        yield from [r for r in sorted(self.prefilling, key=_rank) if r.items_held < len(r.items)]
        if self._next is None:
            self._next = list(islice(self.waiting, AHEAD))
        free = self.memory.available
        for request in self._next:
            free -= request.table.pages_missing(request.num_tokens)
            if free < 0:
                return
            if request.items_held < len(request.items):
                yield request

    # ------------------------------------------------------------ in and out of the queues

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
        self.waiting.add(request)
        self._next = None
        request.pass_items(self.memory.cached_len(request))

    def _leave_queue(self, request: Request, sound: bool = True) -> None:
        """Out of whichever queue it is in, and free of all it holds."""
        if request.status is Status.RUNNING:
            self._drop(request, sound)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
            self._next = None
        else:
            self.parked.remove(request)

    def _drop(self, request: Request, sound: bool = True) -> None:
        """Take from a running request all that it holds; what is ``sound`` of it, others may share."""
        queues = self.decoding, self.prefilling, self.ending
        next(queue for queue in queues if request in queue).remove(request)
        self.memory.drop(request, publish=sound)
        self.features.release(request)
        request.computed_len = request.full_at = 0


def _prefills(request: Request) -> bool:
    return request.status is Status.RUNNING and not request.decoding


def _worth_awaiting(other: Request, request: Request, cached: int) -> bool:
    """Whether ``other`` computes more than half of what ``request`` has to compute behind its ``cached``
    tokens; or, being warm, a page of it and nothing else: each prompt of a session is the one before and a
    little more."""
    common = common_len(other, request)
    gain = min(common, request.sharable_len) - cached
    if 2 * gain > request.num_tokens - cached:
        return True
    return other.warm and common == other.num_tokens and gain >= request.table.page_size


def _rank(request: Request) -> tuple[int, int, float, int]:
    return request.rank
