"""Sessions over the real scheduler, pages, prefix tree and carrier; keys and values tell whose they are."""

import numpy as np
import torch
from helpers.scheduler_world import PAGE_SIZE, World
from helpers.sessions import end_of
from msgspec.structs import replace

from mmserve.core.messages import CarryOver, PreparedRequest, SamplingParams
from mmserve.engine.kv.pool import KVPool, KVShape
from mmserve.engine.session.carry import Carrier
from mmserve.models.config import TextConfig

CONFIG = TextConfig(
    hidden_size=2,
    intermediate_size=2,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=10,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    mrope_section=(1, 0, 0),
    mrope_interleaved=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    max_position=10_000,
)


class SessionWorld(World):
    """The runner stores (cos p, sin p) as the key of a token at position p, and (what it is known by,
    1 + layer) as its value. Before it computes a chunk it looks whether all that stands before it is so."""

    def __init__(self, pages=33, **options):
        super().__init__(pages=pages, **options)
        self.kv = KVPool(KVShape(2, 1, 2, torch.float32), pages, PAGE_SIZE, "cpu")
        self.kv.allocator = self.memory.pages
        self.carrier = Carrier(self.kv, self.memory, CONFIG)
        self.carrier.part_pages = 2
        self.read = 0

    def check(self, chunk):
        super().check(chunk)
        request = chunk.request
        slots = torch.from_numpy(request.table.slots(0, chunk.stop))
        names, positions = request.keys(chunk.stop), positions_of(request, chunk.stop)
        for layer in range(2):
            keys, values = self.kv.keys(layer)[0], self.kv.values(layer)[0]
            right = rows(names, positions, layer)
            known = slots[: chunk.start]
            for stored, wanted in zip((keys, values), right, strict=True):
                torch.testing.assert_close(stored[known], wanted[: chunk.start], rtol=0, atol=1e-4)
                stored[slots[chunk.start :]] = wanted[chunk.start :]
        self.read += chunk.start

    def salts(self):
        """Pages under each salt."""
        prefixes = self.memory.prefixes
        return {salt: pages_below(root) for salt, root in prefixes._roots.items()}

    def evict(self, count):
        self.memory.pages.release(self.memory.prefixes.evict(count))


def pages_below(node):
    return sum(len(child.pages) + pages_below(child) for child in node.children.values())


def positions_of(request, stop):
    """Of the prompt as prepared, then of the answer."""
    said = np.arange(request.prompt_len, max(stop, request.prompt_len)) + request.prepared.position_delta
    return np.concatenate((request.prepared.positions[0], said))[:stop]


def rows(names, positions, layer):
    """The key and the value of each token, [T, 2]."""
    places = torch.from_numpy(positions.astype(np.float64))
    values = torch.tensor([[float(name), 1.0 + layer] for name in names.tolist()]).reshape(-1, 2)
    return torch.stack((places.cos(), places.sin()), 1).float(), values


class Session:
    """A trunk in a world: the names and positions of its tokens, and the salt it stands under."""

    def __init__(self, world, number, head=5):
        self.world, self.number, self.head = world, number, head
        self.salt, self.epochs = None, 0
        self.names, self.positions = [], []
        self.said = 0
        self.grow(head)

    @property
    def keys(self):
        return np.array(self.names, np.int64)

    def grow(self, count):
        """A frame is kept: the trunk is warmed."""
        start = self.positions[-1] + 1 if self.positions else 0
        self.names += [10_000 * (self.number + 1) + self.said + i for i in range(count)]
        self.positions += range(start, start + count)
        self.said += count
        return self.world.take(self._request(0, warm=True))

    def ask(self, words):
        return self.world.take(self._request(words))

    def drop(self, kept, **fields):
        """The head and the last ``kept`` tokens go on; how many of them are cached."""
        end = len(self.names)
        ranges = ((0, self.head), (max(end - kept, self.head), end))
        return self._carry(ranges, **fields)

    def rebase(self):
        """What stands behind the head moves up to it."""
        return self._carry(((0, self.head), (self.head, len(self.names))), head=1, shift=self.gap)

    @property
    def gap(self):
        return self.positions[self.head] - self.head if len(self.names) > self.head else 0

    def _carry(self, kept, **fields):
        self.epochs += 1
        salt, self.salt = self.salt, f"session {self.number} epoch {self.epochs}"
        retire = salt is not None
        order = CarryOver(keys=self.keys, kept=kept, salt=salt, new_salt=self.salt, retire=retire, **fields)
        places = [i for start, stop in kept for i in range(start, stop)]
        shift = fields.get("shift", 0)
        self.names = [self.names[i] for i in places]
        self.positions = [self.positions[i] - (shift if i >= self.head else 0) for i in places]
        return end_of(self.world.carrier.carry(order))

    def _request(self, words, **fields):
        start, count = self.positions[-1] + 1, len(self.names) + words
        names = np.array([*self.names, *range(1, 1 + words)], np.int64)
        positions = np.array([*self.positions, *range(start, start + words)], np.int32)
        request = PreparedRequest(
            request_id="r",
            token_ids=names.astype(np.int32),
            radix_keys=names,
            positions=np.stack([positions] * 3),
            position_delta=start + words - count,
            items=(),
            sampling=SamplingParams(),
            cache_salt=self.salt,
        )
        return replace(request, **fields)
