"""The pages of running requests: the cached prefix they share, then their own."""

from collections.abc import Iterable
from itertools import pairwise

from mmserve.engine.kv.pages import PageAllocator, Run
from mmserve.engine.kv.radix import RadixCache
from mmserve.engine.scheduler.request import Request

GROWTH_TOKENS = 64  # room that a decode takes at once where that is little of what is to be had


class Memory:
    """Who owns which pages, at each moment of a request's life.

        0            shared_len       computed_len      num_tokens       capacity
        |-- the tree's, ---|--- its own: computed, ---|-- and room to grow --|
            locked by it

    ``share`` locks the longest cached prefix, so computing begins behind it. ``publish`` gives the tree
    what was computed since, in whole pages, and moves ``shared_len`` up to there. ``drop`` publishes,
    unlocks, and frees what the request has left. Without ``prefixes`` nothing is shared.
    """

    def __init__(self, pages: PageAllocator, prefixes: RadixCache | None = None) -> None:
        self.pages = pages
        self.prefixes = prefixes

    @property
    def available(self) -> int:
        """Pages that are free, or would be for the asking."""
        return self.pages.free + (self.prefixes.evictable if self.prefixes else 0)

    def cached_len(self, request: Request) -> int:
        """How much of ``request`` is cached at this moment, as far as that is of use."""
        if self.prefixes is None:
            return 0
        return self.prefixes.length(request.keys(request.sharable_len), request.salt)

    def share(self, request: Request) -> None:
        """Lock the longest cached prefix that is of use."""
        if self.prefixes is None:
            return
        found = self.prefixes.match(request.keys(request.sharable_len), request.salt)
        if found.length:
            self.prefixes.lock(found.node)
            request.table.extend(self.prefixes.path(found.node))
            request.node, request.shared_len = found.node, found.length

    def take(self, request: Request) -> bool:
        """Pages for all tokens of ``request``; False, and nothing taken, if there are too few."""
        return self._extend(request, request.table.pages_missing(request.num_tokens))

    def grow(self, request: Request) -> bool:
        """``take`` for one that will ask again: while pages are plenty it takes some ahead, and asks less."""
        missing = request.table.pages_missing(request.num_tokens)
        ahead = GROWTH_TOKENS // request.table.page_size
        if 0 < missing < ahead and self.available > max(self.pages.total // 2, 64 * ahead):
            missing = ahead
        return self._extend(request, missing)

    def _extend(self, request: Request, missing: int) -> bool:
        table = request.table
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        table.extend(self.pages_for(missing, table.last_page))
        return True

    def pages_for(self, count: int, after: int | None = None) -> list[Run]:
        """``count`` pages, of those ``available``; the first follows page ``after`` if it can be."""
        if count > self.pages.free:
            assert self.prefixes is not None
            self.pages.release(self.prefixes.evict(count - self.pages.free))
        runs = self.pages.allocate(count, after)
        assert runs is not None
        return runs

    def publish(self, request: Request) -> None:
        """Let others share what ``request`` has computed. Pages that the tree had meanwhile from somebody
        else are used in place of its own."""
        if self.prefixes is None:
            return
        size = request.table.page_size
        whole = request.computed_len // size * size
        if whole <= request.shared_len:
            return
        found = self.prefixes.insert(
            request.keys(whole), request.table.pages()[: whole // size], request.salt
        )
        self.prefixes.lock(found.node)
        if request.node is not None:
            self.prefixes.unlock(request.node)
        twice = request.table.between(request.shared_len // size, found.length // size)
        request.node, request.shared_len = found.node, whole
        if twice:
            request.table.replace(whole // size, self.prefixes.path(found.node))
            self.pages.release(twice)

    def drop(self, request: Request, publish: bool = True) -> None:
        """The request holds nothing any more. What it computed is kept for others if it is sound."""
        if publish:
            self.publish(request)
        own = request.table.between(request.shared_len // request.table.page_size, request.table.num_pages)
        request.table.clear()
        self.pages.release(own)
        if request.node is not None and self.prefixes is not None:
            self.prefixes.unlock(request.node)
        request.node, request.shared_len = None, 0

    def check_integrity(self, running: Iterable[Request]) -> None:
        """AssertionError unless every page is free, the tree's, or one running request's own."""
        self.pages.check_integrity()
        own: list[Run] = []
        for request in running:
            table = request.table
            own += table.between(request.shared_len // table.page_size, table.num_pages)
        if self.prefixes is not None:
            self.prefixes.check_integrity()
        cached = self.prefixes.pages if self.prefixes else 0
        assert sum(b - a for a, b in own) + cached == self.pages.in_use, "a page without an owner"
        own.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(own)), "a page with two owners"
