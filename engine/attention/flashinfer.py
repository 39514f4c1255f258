"""Attention by FlashInfer's kernels over the paged pool: the first choice on NVIDIA GPUs.

The library separates a ``plan`` on the host (how contexts are split among the processors) from ``run``, once
a layer. Steps of decodes have a planner for each number of rows, over buffers that stay where they are, so
they may be captured: a later ``plan`` changes what a replay reads, never where from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmserve.engine.attention.base import Extent, Span
from mmserve.engine.attention.page_lists import Contexts, PageLists, shared_pages
from mmserve.engine.attention.plan_memory import Pinned, Static
from mmserve.engine.kv.pages import DUMMY_PAGE
from mmserve.engine.kv.pool import KVPool
from mmserve.models.ops.flashinfer import Planner, library, workspace

LAYOUT = "HND"  # how the library is told the pool: [pages, kv_heads, page_size, head_dim]
FEW_QUERIES = 2  # of a key: more are worth the matrix units, which the library multiplies 16 at a time
CASCADE_ROWS = 8  # at least so many requests with a common prefix, and
CASCADE_SPARED = 1 << 16  # so many tokens that are not read again: beyond any cache, where a merge costs less


class FlashInferAttention:
    """Decodes and prompts are planned apart: rows of the first decodes of a step go to the library's decode
    kernels, the others to those for prompts. Requests of a step of decodes that all begin with the same pages
    have those read once (``form`` "cascade"), if that spares enough.

    Padding rows of a step of decodes read the dummy page, which nobody writes: its zeros are their answer.
    """

    capturable = True  # steps of decodes alone, each number of rows and ``form`` a graph of its own
    captured_rows = 0  # of steps with prompts
    stores_fused = True

    def __init__(self, pool: KVPool, extent: Extent, package: Any = None) -> None:
        """ImportError where FlashInfer is not installed (``models.ops.flashinfer.unusable`` tells). Kernels
        are compiled here if they never were."""
        self.pool = pool
        self.heads = extent.heads
        self.max_decodes = extent.max_decodes
        self.form = "plain"
        self._package = package or library()
        self._device = pool.data.device
        self._lists = PageLists(pool.page_size)
        self._floats = workspace(self._device)
        self._static = Static(extent, pool.page_size, self._device)
        self._pinned = Pinned(self._device)
        self._planners: dict[tuple[str, int], Planner] = {}  # by form and rows
        self._slots = self._static.slots[:0]
        self._calls: list[Call] = []
        self._compile()

    # ------------------------------------------------------------ once a step

    def plan(self, spans: Sequence[Span], num_rows: int) -> None:
        """``spans`` stand one behind another from row 0 on; ValueError if they do not."""
        if spans and spans[-1].row + len(spans[-1]) != sum(map(len, spans)):
            raise ValueError("rows of padding stand behind all others")
        self._lists.keep(spans)
        self._pinned.begin()
        decodes = next((i for i, span in enumerate(spans) if len(span) > 1), len(spans))
        if decodes == len(spans) and num_rows <= self.max_decodes:
            self._plan_decodes(spans, num_rows)
        else:
            self._plan_mixed(spans, decodes, num_rows)
        self._pinned.end()

    def _plan_decodes(self, spans: Sequence[Span], rows: int) -> None:
        """One token a request, over the static buffers."""
        contexts = self._lists.contexts(spans).padded(rows)
        self._slots = self._static.slots[:rows]
        self._pinned.send(self._lists.newest_slots(spans, rows), self._slots)
        shared = self._shared(spans)
        self.form = "cascade" if shared else "plain"
        planner = self._planner(self.form, rows)
        if shared:
            self._plan_cascade(planner, contexts, shared, len(spans))
        else:
            self._decode(planner, contexts, self._static.indices)
        self._calls = [Call(slice(0, rows), planner)]

    def _plan_mixed(self, spans: Sequence[Span], decodes: int, rows: int) -> None:
        """Decodes first, then prompts, over memory that is of this step alone."""
        self.form, self._calls = "plain", []
        self._slots = torch.empty(rows, dtype=torch.int32, device=self._device)
        self._pinned.send(self._lists.slots(spans, rows), self._slots)
        if decodes:
            planner = self._planner("decodes", 0)
            self._decode(planner, self._lists.contexts(spans[:decodes]), None)
            self._calls.append(Call(slice(0, decodes), planner))
        if prompts := spans[decodes:]:
            planner = self._planner("prompts", 0)
            self._prompts(planner, prompts)
            last = prompts[-1]
            self._calls.append(Call(slice(prompts[0].row, last.row + len(last)), planner))

    def _shared(self, spans: Sequence[Span]) -> int:
        """Pages that all of ``spans`` begin with, if it is worth to read them apart; else 0."""
        if len(spans) < CASCADE_ROWS:
            return 0
        pages = shared_pages(spans, self.pool.page_size)
        spared = pages * self.pool.page_size * (len(spans) - 1)
        return pages if spared >= CASCADE_SPARED else 0

    # ------------------------------------------------------------ once a layer

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        _store(k, v, *self.kv_slots(layer))
        return self.attend(q, layer)

    def kv_slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of ``layer``, [kv_heads, slots, head_dim], and the slot of each row, int32 [T], -1
        for padding: for whoever stores in a kernel of its own and then calls ``attend``."""
        return self.pool.keys(layer), self.pool.values(layer), self._slots

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """q [T, heads, head_dim], heads of a row dense; keys and values of its rows are in the pool."""
        cache = self._paged(self.pool.keys(layer)), self._paged(self.pool.values(layer))
        if [call.rows for call in self._calls] == [slice(0, q.shape[0])]:
            whole: torch.Tensor = self._calls[0].planner.run(q, cache)
            return whole
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for call in self._calls:
            call.planner.run(q[call.rows], cache, out=out[call.rows])
        return out

    def _paged(self, side: torch.Tensor) -> torch.Tensor:
        """[kv_heads, slots, head_dim] as [pages, kv_heads, page_size, head_dim], where it lies."""
        return side.unflatten(1, (-1, self.pool.page_size)).transpose(0, 1)

    # ------------------------------------------------------------ what the library is told

    def _planner(self, form: str, rows: int) -> Planner:
        if (form, rows) not in self._planners:
            levels = 2 if form == "cascade" else None
            self._planners[form, rows] = Planner(self._wrapper(form, rows), self._floats, levels)
        return self._planners[form, rows]

    def _wrapper(self, form: str, rows: int) -> Any:
        """``rows``: of a form over static buffers."""
        if form == "prompts":
            return self._package.BatchPrefillWithPagedKVCacheWrapper(
                self._floats, LAYOUT, backend=_prompt_kernels(self._device)
            )
        if form == "cascade":
            return self._package.MultiLevelCascadeAttentionWrapper(
                2, self._floats, LAYOUT, use_cuda_graph=True, **self._static.cascade(rows)
            )
        static = self._static.decodes(rows) if form == "plain" else {"use_cuda_graph": False}
        several = self.heads // self.pool.shape.kv_heads > FEW_QUERIES
        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._floats, LAYOUT, use_tensor_cores=several, backend="fa2", **static
        )

    def _decode(self, planner: Planner, contexts: Contexts, indices: torch.Tensor | None) -> None:
        """``indices``: where the device reads the pages, if that is to stay."""
        ends, last, pages = self._pinned.contexts(contexts, indices)
        planner.plan(ends, pages, last, *self._shape, **self._dtypes)

    def _prompts(self, planner: Planner, spans: Sequence[Span]) -> None:
        ends, last, pages = self._pinned.contexts(self._lists.contexts(spans), None)
        rows = self._pinned.host(np.cumsum([0, *map(len, spans)], dtype=np.int32))
        planner.plan(rows, ends, pages, last, *self._shape, causal=True, **self._dtypes)

    def _plan_cascade(self, planner: Planner, contexts: Contexts, shared: int, count: int) -> None:
        """Two levels: what the first ``count`` rows share, and what each row has alone. Padding reads the
        dummy page on both."""
        rows = len(contexts.lengths)
        common, own = contexts.split(shared, count)
        upper = self._pinned.contexts(common, self._static.common)
        lower = self._pinned.contexts(own, self._static.indices)
        queries = (np.array([0, count, rows], np.int32), np.arange(rows + 1, dtype=np.int32))
        planner.plan(
            [self._pinned.host(ends) for ends in queries],
            *([upper[i], lower[i]] for i in (0, 2, 1)),
            *self._shape,
            **self._dtypes,
        )

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        shape = self.pool.shape
        return self.heads, shape.kv_heads, shape.head_dim, self.pool.page_size

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.pool.shape.dtype, "kv_data_type": self.pool.shape.dtype}

    def _compile(self) -> None:
        """Plan something small of every form: the library compiles what it has not yet."""
        dummy = Contexts([np.array([DUMMY_PAGE], np.int32)], np.array([1]), self.pool.page_size)
        self._pinned.begin()
        self._decode(self._planner("decodes", 0), dummy, None)
        ends, last, pages = self._pinned.contexts(dummy, None)
        self._planner("prompts", 0).plan(ends, ends, pages, last, *self._shape, causal=True, **self._dtypes)
        self._pinned.end()


@dataclass(frozen=True, slots=True)
class Call:
    """``rows`` of a step that ``planner`` answers."""

    rows: slice
    planner: Planner


def _store(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Row t of k, v [T, kv_heads, head_dim] into slot ``slots[t]``; -1 for nowhere."""
    if k.is_cuda:
        from mmserve.models.ops.triton.kv_store import store

        store(k, v, keys, values, slots)
        return
    kept = slots >= 0
    keys[:, slots[kept]], values[:, slots[kept]] = k[kept].transpose(0, 1), v[kept].transpose(0, 1)


def _prompt_kernels(device: torch.device) -> str:
    """On Hopper the library may take those with its own instructions; elsewhere those that run on all."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return "auto" if hopper else "fa2"
