"""Attention by Triton kernels over the paged pool: on NVIDIA GPUs where FlashInfer does not run.

A step's plan is arrays of numbers that say which rows are whose; the kernels find everything else. Decodes
have their contexts cut into splits, prompts are cut into tiles of rows.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mmserve.engine.attention.base import Extent, Span
from mmserve.engine.attention.page_lanes import PageLanes
from mmserve.engine.attention.plan_memory import Pinned
from mmserve.engine.kv.pool import KVPool
from mmserve.models.ops.triton import decode_attention, prefill_attention
from mmserve.models.ops.triton.kv_store import store
from mmserve.models.ops.triton.runtime import INTERPRETED

Ints = npt.NDArray[np.int32]

STATIC_ROWS = 64  # of the largest step with prompts that is planned in memory that stays
FEW_PROCESSORS = 4  # where there is no GPU to ask: enough for some splits in tests
ALIGNED = 4  # numbers: an array of a plan begins at 16 bytes, so one compiled kernel serves all


class TritonAttention:
    """``form`` "decodes": row i is one request's new token, or padding. ``form`` "mixed": rows as they come.

    A small step, and any of decodes alone, is planned in ``_memory``, with as many programs as its number of
    rows may need; so a graph of that form and number of rows does whatever such a plan says. A larger step
    has memory of its own.

        decodes  int32 [n, 3]  row, tokens of the context, lane      (decode_attention)
        tiles    int32 [m, 6]  rows, where they stand, lane          (prefill_attention)
        slots    int32 [rows]  where new keys and values go, -1 for padding
    """

    capturable = not INTERPRETED  # an interpreted kernel is no device's work
    captured_rows = STATIC_ROWS
    stores_fused = True

    def __init__(self, pool: KVPool, extent: Extent) -> None:
        """Kernels are compiled here if they never were; those of decodes when a size of batch first comes."""
        self.pool = pool
        self.form = "decodes"
        self._tile_rows = 1
        self._heads = extent.heads
        self._max_decodes = extent.max_decodes
        self._max_len = extent.max_len
        self._group = extent.heads // pool.shape.kv_heads
        self._device = pool.data.device
        self._processors = _processors(self._device)
        self._lanes = PageLanes(extent.max_decodes, -(-extent.max_len // pool.page_size))
        self._table = torch.zeros(self._lanes.host.shape, dtype=torch.int32, device=self._device)
        self._pinned = Pinned(self._device)
        self._memory = self._ints(max(_room(extent.max_decodes, 0), _room(STATIC_ROWS, STATIC_ROWS)))
        self._parts, self._sums = self._scratch()
        if self._device.type == "cuda":
            self._compile()

    # ------------------------------------------------------------ once a step

    def plan(self, spans: Sequence[Span], num_rows: int) -> None:
        """ValueError for more spans than the extent told."""
        lanes, changes = self._lanes.place([span.table for span in spans])
        self._pinned.begin()
        self._tell(*changes)
        slots = self._slots(spans, lanes, num_rows)
        if all(len(span) == 1 for span in spans) and num_rows <= self._max_decodes:
            self._plan_decodes(spans, lanes, slots)
        else:
            self._plan_mixed(spans, lanes, slots)
        self._pinned.end()

    def _plan_decodes(self, spans: Sequence[Span], lanes: Ints, slots: Ints) -> None:
        decodes = np.zeros((len(slots), decode_attention.FIELDS), np.int32)
        decodes[:, 0] = np.arange(len(slots))
        if spans:
            rows = [span.row for span in spans]
            decodes[rows, 1] = [span.stop for span in spans]
            decodes[rows, 2] = lanes
        self.form = "decodes"
        self._send(self._memory, decodes, np.empty((0, prefill_attention.FIELDS), np.int32), slots)

    def _plan_mixed(self, spans: Sequence[Span], lanes: Ints, slots: Ints) -> None:
        rows = len(slots)
        numbered = list(zip(spans, lanes.tolist(), strict=True))
        single = [(s.row, s.stop, lane) for s, lane in numbered if len(s) == 1]
        self._tile_rows = prefill_attention.tile_rows(
            rows, self._group, self.pool.shape.head_dim, self.pool.shape.dtype
        )
        tiles = [tile for s, lane in numbered if len(s) > 1 for tile in _tiles(s, lane, self._tile_rows)]
        tiles.sort(key=lambda tile: -tile[2])  # those that see most begin first
        tiles += _padding(slots, self._tile_rows)
        still = rows <= STATIC_ROWS
        decodes = _filled(single, rows if still else len(single), decode_attention.FIELDS, -1)
        cut = _filled(tiles, rows if still else len(tiles), prefill_attention.FIELDS, 0)
        self.form = "mixed"
        memory = self._memory if still else self._ints(_room(rows, len(cut), len(decodes)))
        self._send(memory, decodes, cut, slots)

    def _slots(self, spans: Sequence[Span], lanes: Ints, num_rows: int) -> Ints:
        """Where each row's key and value go, int32 [num_rows]."""
        slots = np.full(num_rows, -1, np.int32)
        rows, starts, stops = (
            np.array([getattr(s, name) for s in spans], np.int64) for name in ("row", "start", "stop")
        )
        counts = stops - starts
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = np.repeat(starts, counts) + within
        size = self.pool.page_size
        pages = self._lanes.host[np.repeat(lanes, counts), tokens // size]
        slots[np.repeat(rows, counts) + within] = pages * size + tokens % size
        return slots

    def _tell(self, places: Ints, pages: Ints) -> None:
        """The device's copy of the lanes follows the host's."""
        if len(places):
            sent = self._ints(2 * len(places))
            self._pinned.send(np.concatenate((places, pages)), sent)
            self._table.view(-1).index_copy_(0, sent[: len(places)].long(), sent[len(places) :])

    def _send(self, memory: torch.Tensor, decodes: Ints, tiles: Ints, slots: Ints) -> None:
        """The arrays one behind another into ``memory``, and where the kernels find them there."""
        second = _aligned(decodes.size)
        third = second + _aligned(tiles.size)
        whole = np.zeros(third + slots.size, np.int32)
        whole[: decodes.size] = decodes.reshape(-1)
        whole[second : second + tiles.size] = tiles.reshape(-1)
        whole[third:] = slots
        self._pinned.send(whole, memory[: whole.size])
        self._decodes = memory[: decodes.size].view(decodes.shape)
        self._tiles = memory[second : second + tiles.size].view(tiles.shape)
        self._rows = memory[third : whole.size]

    # ------------------------------------------------------------ once a layer

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        store(k, v, *self.kv_slots(layer))
        return self.attend(q, layer)

    def kv_slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of ``layer``, [kv_heads, slots, head_dim], and the slot of each row, int32 [T], -1
        for padding: for whoever stores in a kernel of its own and then calls ``attend``."""
        return self.pool.keys(layer), self.pool.values(layer), self._rows

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """q [T, heads, head_dim], heads may be strided; keys and values of its rows are in the pool."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cache = self.pool.keys(layer), self.pool.values(layer), self._table
        size, splits = self.pool.page_size, self._splits(len(self._decodes))
        decode_attention.decode(q, *cache, self._decodes, size, out, self._parts, self._sums, splits)
        if len(self._tiles):
            prefill_attention.prefill(q, *cache, self._tiles, self._tile_rows, size, out)
        return out

    def _splits(self, decodes: int) -> int:
        return decode_attention.splits_for(
            max(decodes, 1), self.pool.shape.kv_heads, self._max_len, self._processors
        )

    # ------------------------------------------------------------ memory

    def _ints(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=self._device)

    def _scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What splits find, for the step that needs most of it."""
        largest = max(self._max_decodes, STATIC_ROWS)
        most = max(n * s for n in range(1, largest + 1) if (s := self._splits(n)) > 1 or n == 1)
        parts = torch.empty(most * self._heads * self.pool.shape.head_dim, device=self._device)
        return parts, torch.empty(most * self._heads, device=self._device)

    def _compile(self) -> None:
        """Attend with no rows by every form of the kernel for prompts."""
        shape = self.pool.shape
        qkv = self._heads + 2 * shape.kv_heads
        q = torch.empty(1, qkv, shape.head_dim, dtype=shape.dtype, device=self._device)[:, : self._heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=self._device)
        tiles = torch.zeros(1, prefill_attention.FIELDS, dtype=torch.int32, device=self._device)
        cache = self.pool.keys(0), self.pool.values(0), self._table
        sizes = {
            prefill_attention.tile_rows(1 << n, self._group, shape.head_dim, shape.dtype) for n in range(8)
        }
        for rows in sizes:
            prefill_attention.prefill(q, *cache, tiles, rows, self.pool.page_size, out)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return FEW_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _room(rows: int, tiles: int, decodes: int | None = None) -> int:
    """Numbers of a plan of ``rows`` rows, of which ``decodes`` (all if not given) and ``tiles`` are told."""
    decodes = rows if decodes is None else decodes
    return decodes * decode_attention.FIELDS + tiles * prefill_attention.FIELDS + rows + 3 * ALIGNED


def _tiles(span: Span, lane: int, rows: int) -> list[tuple[int, ...]]:
    """``span`` in tiles of ``rows`` rows."""
    return [
        (span.row + at, min(rows, len(span) - at), span.start + at, lane, span.start, span.stop)
        for at in range(0, len(span), rows)
    ]


def _aligned(count: int) -> int:
    """Numbers that an array of ``count`` takes before the next one may begin."""
    return -(-count // ALIGNED) * ALIGNED


def _padding(slots: Ints, rows: int) -> list[tuple[int, ...]]:
    """Tiles of the rows in no span, whose answers are 0."""
    found: list[tuple[int, ...]] = []
    for row in np.flatnonzero(slots < 0).tolist():
        if found and found[-1][0] + found[-1][1] == row and found[-1][1] < rows:
            found[-1] = (found[-1][0], found[-1][1] + 1, 0, -1, 0, 0)
        else:
            found.append((row, 1, 0, -1, 0, 0))
    return found


def _filled(entries: Sequence[tuple[int, ...]], count: int, fields: int, nothing: int) -> Ints:
    """``entries`` as int32 [count, fields], and behind them those that say ``nothing``."""
    found = np.full((count, fields), nothing, np.int32)
    if entries:
        found[: len(entries)] = entries
    return found
