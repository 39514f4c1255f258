"""The prefix cache: a radix tree over radix keys whose nodes own pages of the KV pool."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmserve.engine.kv.pages import Run

Keys = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
Salt = tuple[str | None, str | None]  # cache salt and adapter: prefixes under different salts never meet


@dataclass(eq=False, slots=True)
class Node:
    """``keys`` [tokens], whole pages of them, follow the parent's; ``pages`` hold their keys and values.

    ``locks`` counts the requests that use the node or anything below it. A locked node stays as it is,
    but for being split, which leaves the lock on both halves.
    """

    keys: Keys
    pages: Pages
    parent: "Node | None"
    locks: int = 0
    used: int = 0  # the tree's clock when a request last had it
    children: dict[bytes, "Node"] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Root(Node):
    """The empty prefix under one salt; in the tree while it has children."""

    salt: Salt = (None, None)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its last node, and its length in tokens."""

    node: Node
    length: int


class RadixCache:
    """Owns the pages of prefixes that were computed, shared by all requests that begin alike.

    A request locks what it matched for as long as it reads it. Unlocked nodes are evicted from the
    leaves up, the least recently used first, which a heap finds without walking the tree. Only whole
    pages are shared: half a page's slots may still be written by the request that has it.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages = self.evictable = 0  # pages owned, and those of them in unlocked nodes
        self.nodes = 0
        self._roots: dict[Salt, Root] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (used, serial, leaf); may be outdated
        self._serial = 0

    # ------------------------------------------------------------ what requests do

    def match(self, keys: Keys, salt: Salt = (None, None)) -> Match:
        """The longest prefix of ``keys`` in whole pages that is cached. Nothing is locked or touched."""
        node: Node = self._roots.get(salt) or _new_root(salt)
        length = 0
        for child, common in self._walk(node, keys):
            node = child if common == len(child.keys) else self._split(child, common)
            length += common
        return Match(node, length)

    def length(self, keys: Keys, salt: Salt = (None, None)) -> int:
        """The length of ``match``, and nothing else."""
        root = self._roots.get(salt)
        return sum(common for _, common in self._walk(root, keys)) if root else 0

    def lock(self, node: Node) -> None:
        """Keep ``node`` and all above it until ``unlock``; they become the most recently used."""
        self._clock += 1
        for above in _up(node):
            if above.locks == 0:
                self.evictable -= len(above.pages)
            above.locks += 1
            above.used = self._clock

    def unlock(self, node: Node) -> None:
        for above in _up(node):
            above.locks -= 1
            if above.locks == 0:
                self.evictable += len(above.pages)
        self._offer(node)

    def insert(self, keys: Keys, pages: Pages, salt: Salt = (None, None)) -> Match:
        """Give the tree the pages of ``keys`` (whole pages), as far as it has no equal ones.

            0            match.length            len(keys)
            |- was cached: -|- the tree's from now on -|
               still the caller's

        Returns the match as it was before, with the node that now ends ``keys``.
        """
        found = self.match(keys, salt)
        rest = keys[found.length :]
        if not len(rest):
            return found
        return Match(self._grow(found.node, rest, pages[found.length // self.page_size :]), found.length)

    def path(self, node: Node) -> list[Run]:
        """The pages from the root to the end of ``node``, in order, as runs."""
        nodes = list(_up(node))[::-1]
        return runs_of(np.concatenate([n.pages for n in nodes])) if nodes else []

    # ------------------------------------------------------------ making room

    def evict(self, count: int) -> list[Run]:
        """Give up at least ``count`` pages, or all that can be; they are the caller's to free.

        Of the last leaf only its end goes, so that what is left stays a prefix.
        """
        given: list[Run] = []
        while count > 0 and (leaf := self._oldest()) is not None:
            cut = max(len(leaf.pages) - count, 0)
            given += runs_of(leaf.pages[cut:])
            count -= len(leaf.pages) - cut
            self._shorten(leaf, cut)
        return given

    def demote(self, salt: Salt) -> None:
        """Nobody will ask for what is under ``salt`` again: let it be the first to be evicted."""
        root = self._roots.get(salt)
        for node in _below(root) if root else ():
            node.used = 0
            self._offer(node)

    def clear(self) -> list[Run]:
        """Give up everything that is not locked."""
        return self.evict(self.evictable)

    def check_integrity(self) -> None:
        """AssertionError unless counts, locks and links are as they must be."""
        nodes = [n for root in self._roots.values() for n in _below(root)]
        assert sum(len(n.pages) for n in nodes) == self.pages, "pages unaccounted"
        assert sum(len(n.pages) for n in nodes if not n.locks) == self.evictable, "evictable pages miscounted"
        for node in nodes:
            assert len(node.keys) == len(node.pages) * self.page_size > 0
            assert node.locks >= sum(child.locks for child in node.children.values()), "a lock lost its way"
            assert all(child.parent is node for child in node.children.values())
        owned = np.concatenate([n.pages for n in nodes]) if nodes else np.empty(0)
        assert len(nodes) == self.nodes, "nodes miscounted"
        assert all(root.children for root in self._roots.values()), "an empty root"
        assert len(np.unique(owned)) == len(owned), "a page in two nodes"
        offered = {id(leaf) for used, _, leaf in self._leaves if leaf.used == used}
        assert all(id(n) in offered for n in nodes if _is_free_leaf(n)), "a leaf that is never evicted"

    # ------------------------------------------------------------ the tree

    def _walk(self, node: Node, keys: Keys) -> Iterator[tuple[Node, int]]:
        """The nodes along ``keys``, each with how many tokens of it agree: all of them but in the last."""
        start = 0
        while (child := node.children.get(self._name(keys, start))) is not None:
            common = self._common(child.keys, keys[start:])
            whole = common == len(child.keys)
            yield child, common
            if not whole:
                return
            node, start = child, start + common

    def _grow(self, above: Node, keys: Keys, pages: Pages) -> Node:
        """A new leaf under ``above``."""
        self._clock += 1
        leaf = Node(keys.copy(), pages.astype(np.int32), above, used=self._clock)
        above.children[self._name(keys, 0)] = leaf
        if isinstance(above, Root):
            self._roots[above.salt] = above
        self.nodes += 1
        self.pages += len(pages)
        self.evictable += len(pages)
        self._offer(leaf)
        return leaf

    def _name(self, keys: Keys, start: int) -> bytes:
        """What a child is found by: its first page's keys."""
        return keys[start : start + self.page_size].tobytes()

    def _common(self, ours: Keys, theirs: Keys) -> int:
        """Length of the common beginning, in tokens of whole pages."""
        count = min(len(ours), len(theirs))
        different = np.flatnonzero(ours[:count] != theirs[:count])
        same = int(different[0]) if len(different) else count
        return same - same % self.page_size

    def _split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens; the new upper half is returned. Locks hold for both."""
        assert node.parent is not None
        cut = length // self.page_size
        upper = Node(node.keys[:length], node.pages[:cut], node.parent, node.locks, node.used)
        node.parent.children[self._name(upper.keys, 0)] = upper
        node.keys, node.pages, node.parent = node.keys[length:], node.pages[cut:], upper
        upper.children[self._name(node.keys, 0)] = node
        self.nodes += 1
        return upper

    def _shorten(self, leaf: Node, cut: int) -> None:
        """Keep the first ``cut`` pages of an unlocked leaf; with none left it goes."""
        gone = len(leaf.pages) - cut
        self.pages -= gone
        self.evictable -= gone
        if cut:
            leaf.keys, leaf.pages = leaf.keys[: cut * self.page_size].copy(), leaf.pages[:cut].copy()
            self._offer(leaf)
        else:
            self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        above, leaf.parent = leaf.parent, None
        assert above is not None
        del above.children[self._name(leaf.keys, 0)]
        self.nodes -= 1
        self._offer(above)
        if isinstance(above, Root) and not above.children:
            del self._roots[above.salt]

    # ------------------------------------------------------------ the oldest leaf

    def _offer(self, node: Node) -> None:
        """Put ``node`` among the leaves that may be evicted, if it is one."""
        if not _is_free_leaf(node):
            return
        if len(self._leaves) > 4 * self.nodes + 64:
            self._sweep()
        self._serial += 1
        heapq.heappush(self._leaves, (node.used, self._serial, node))

    def _oldest(self) -> Node | None:
        """Take the least recently used free leaf. Entries whose node has changed since are passed over."""
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.used == used and _is_free_leaf(node):
                return node
        return None

    def _sweep(self) -> None:
        """Forget outdated entries."""
        kept = {id(node): (used, serial, node) for used, serial, node in self._leaves if used == node.used}
        self._leaves = [entry for entry in kept.values() if _is_free_leaf(entry[2])]
        heapq.heapify(self._leaves)


def runs_of(pages: Pages) -> list[Run]:
    """Page numbers in order as runs of consecutive ones."""
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    starts, stops = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(pages)])) - 1
    return [(int(pages[a]), int(pages[b]) + 1) for a, b in zip(starts, stops, strict=True)]


def _new_root(salt: Salt) -> Root:
    return Root(np.empty(0, np.int64), np.empty(0, np.int32), None, salt=salt)


def _is_free_leaf(node: Node) -> bool:
    return node.parent is not None and not node.children and not node.locks


def _up(node: Node) -> Iterator[Node]:
    """``node`` and its ancestors, without the root."""
    at: Node | None = node
    while at is not None and at.parent is not None:
        yield at
        at = at.parent


def _below(root: Node) -> Iterator[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()
