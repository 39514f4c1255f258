"""What a session keeps when a window of its context is dropped, without computing it again."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from mmserve.core.errors import ConfigError, InvalidRequest
from mmserve.core.messages import CarryOver
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool
from mmserve.engine.kv.radix import Match, Node, RadixCache
from mmserve.engine.scheduler.memory import Memory
from mmserve.engine.session.rotate import moved_back
from mmserve.models.config import TextConfig

Places = npt.NDArray[np.int64]  # of tokens in the old prompt, or of slots in the pool

PART_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}  # of keys and values; some 10 ms each


class Carrier:
    """Copies keys and values of cached tokens to pages under another salt, in parts, between steps.

        old salt   |-- head --|-- dropped --|------ kept ------|-- not cached --|
                        |                           |
        new salt   |-- head --|------ kept ------|   whole pages

    Pages under the old salt stay where they are, for whoever reads them. New ones come from free pages and
    from what can be evicted, and belong to the tree, unlocked: they can be evicted in their turn, so nobody
    has less room than before. Both prefixes are locked during a part, lest one be evicted for the other, and
    between two neither is: what is evicted then is not carried over.
    """

    def __init__(self, kv: KVPool, memory: Memory, config: TextConfig) -> None:
        self.kv = kv
        self.memory = memory
        self.config = config
        page_bytes = kv.shape.token_bytes * kv.page_size
        self.part_pages = max(PART_BYTES[kv.data.device.type] // page_bytes, 1)
        self.carried_tokens = 0

    def carry(self, order: CarryOver) -> Generator[None, None, int]:
        """Part by part. It returns how many tokens of the new prompt are cached then, from its first on: as
        far as those of the old one are, and as there is room, in whole pages.

        ConfigError without a prefix cache, InvalidRequest for an order that contradicts itself; neither
        changes anything.
        """
        prefixes = self.memory.prefixes
        if prefixes is None:
            raise ConfigError("prefix_caching is off: nothing is there to carry over", param="prefix_caching")
        check_order(order)
        kept = _places(order)
        before, length = 0, self._part(prefixes, order, kept)
        while length > before:
            yield
            before, length = length, self._part(prefixes, order, kept)
        if order.retire:
            prefixes.demote((order.salt, None))
        return length

    def _part(self, prefixes: RadixCache, order: CarryOver, kept: Places) -> int:
        """Carry over the next part of what is lacking under the new salt; what is there afterwards."""
        old = prefixes.match(order.keys, (order.salt, None))
        new = prefixes.match(order.keys[kept], (order.new_salt, None))
        with _locked(prefixes, old.node), _locked(prefixes, new.node):
            return self._extend(prefixes, order, kept, old, new)

    def _extend(self, prefixes: RadixCache, order: CarryOver, kept: Places, old: Match, new: Match) -> int:
        size = self.kv.page_size
        cached = int(np.searchsorted(kept, old.length))  # of ``kept``
        count = min((cached - new.length) // size, self.memory.available, self.part_pages)
        if count <= 0:
            return new.length
        source, target = _table(prefixes, old.node), _table(prefixes, new.node)
        runs = self.memory.pages_for(count, target.last_page)
        target.extend(runs)
        length = target.capacity
        try:
            slots = source.slots(0, old.length)[kept[new.length : length]]
            first = max(_first_shifted(order) - new.length, 0)
            self._copy(slots, target.slots(new.length, length), first, order.shift)
        except BaseException:
            self.memory.pages.release(runs)
            raise
        prefixes.insert(order.keys[kept[:length]], target.pages(), (order.new_salt, None))
        self.carried_tokens += length - new.length
        return length

    @torch.inference_mode()
    def _copy(self, source: Places, target: Places, first: int, shift: int) -> None:
        """Slots ``source`` [n] to ``target`` [n], layer by layer; the keys from number ``first`` on are moved
        back by ``shift``."""
        device = self.kv.data.device
        taken, given = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        for layer in range(self.kv.shape.layers):
            keys = self.kv.keys(layer).index_select(1, taken)
            if shift and first < len(source):
                keys[:, first:] = moved_back(keys[:, first:], shift, self.config)
            self.kv.keys(layer).index_copy_(1, given, keys)
            values = self.kv.values(layer)
            values.index_copy_(1, given, values.index_select(1, taken))


def check_order(order: CarryOver) -> None:
    """InvalidRequest, naming the field, unless ``order`` makes sense."""
    bounds = [0, *(bound for kept in order.kept for bound in kept), len(order.keys)]
    rules = [
        ("kept", bounds == sorted(bounds), f"ranges of {len(order.keys)} tokens in ascending order"),
        ("new_salt", order.new_salt != order.salt, "another than salt"),
        ("shift", order.shift >= 0, "0 or more"),
        (
            "head",
            0 <= order.head <= len(order.kept),
            f"a number of ranges, of which {len(order.kept)} are kept",
        ),
        ("retire", not order.retire or order.salt is not None, "false without a salt, where others may come"),
    ]
    for name, fine, allowed in rules:
        if not fine:
            raise InvalidRequest(f"{name} must be {allowed}, not {getattr(order, name)!r}", param=name)


def _places(order: CarryOver) -> Places:
    """Where the tokens kept stand in the old prompt, int64, ascending."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, b) for a, b in order.kept)])


def _first_shifted(order: CarryOver) -> int:
    """The first token of the new prompt whose position changes."""
    return sum(stop - start for start, stop in order.kept[: order.head])


def _table(prefixes: RadixCache, node: Node) -> PageTable:
    """The pages of the prefix that ends with ``node``."""
    table = PageTable(prefixes.page_size)
    table.extend(prefixes.path(node))
    return table


@contextmanager
def _locked(prefixes: RadixCache, node: Node) -> Iterator[None]:
    prefixes.lock(node)
    try:
        yield
    finally:
        prefixes.unlock(node)
