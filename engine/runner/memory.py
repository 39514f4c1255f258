"""How much of a GPU's memory the KV pool gets: what is left when everything else is at its worst.

    |- taken: weights, others -|- steps -|- pictures -|- features -|- sampler -|- graphs -|- KV -|  rest  |
    0                                                                                        limit     total

The largest prefill and the largest picture are computed once, over a pool that holds just these, and what
that took at its worst is kept free for them, for both together: pictures are encoded beside steps.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isqrt

import torch

from mmserve.core.config import Config
from mmserve.core.device import Device
from mmserve.core.errors import ConfigError
from mmserve.encoders.graphs import EncoderGraphs
from mmserve.engine.attention.base import AttentionBackend, Span
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.pool import KVPool, KVShape
from mmserve.engine.runner.graphs import StepGraphs
from mmserve.engine.sampling.prompt_scores import LOGIT_ROWS
from mmserve.models.forward import ForwardInput, VisionRows
from mmserve.models.registry import LoadedModel

log = logging.getLogger(__name__)

MOST_SLOTS = 2**31 - 1  # kernels tell slots as int32
GRAPH_BYTES = 4 << 20  # of the driver's own for each graph

Attend = Callable[[KVPool], AttentionBackend]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a device: all it has, the ``limit`` of what may be taken, and what for."""

    total: int
    limit: int
    taken: int
    steps: int
    pictures: int
    features: int
    sampler: int
    graphs: int

    @property
    def kv(self) -> int:
        spent = self.taken + self.steps + self.pictures + self.features + self.sampler + self.graphs
        return max(self.limit - spent, 0)

    def said(self) -> str:
        parts = {**asdict(self), "kv": self.kv}
        return ", ".join(f"{name} {nbytes / 2**30:.2f}" for name, nbytes in parts.items())


class Profile:
    """Measures what ``config`` takes of ``device`` with ``model`` at its worst.

    ``attend`` makes attention over a pool; ``encoder_tokens`` are vision tokens of a batch of pictures;
    ``encoder_graphs``, if there will be any, and the steps' are captured on ``trial``, the same device under
    another name, since the memory that graphs share ends with the last of them.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: Config,
        device: Device,
        trial: Device,
        attend: Attend,
        encoder_tokens: int,
        encoder_graphs: EncoderGraphs | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.trial = trial
        self.attend = attend
        self.encoder_tokens = encoder_tokens
        self.encoder_graphs = encoder_graphs

    @torch.inference_mode()
    def plan(self, sampler_bytes: int) -> MemoryPlan:
        """Everything is as free afterwards as before."""
        self.device.give_back()
        total = self.device.total_memory()
        taken = total - self.device.free_memory()
        steps, graphs = self._steps()
        plan = MemoryPlan(
            total=total,
            limit=int(total * self.config.cache.gpu_memory_share),
            taken=taken,
            steps=steps,
            pictures=self.device.peak(self._largest_picture),
            features=self.config.cache.encoder_cache_mib << 20,
            sampler=sampler_bytes,
            graphs=graphs,
        )
        self.encoder_graphs = None
        gc.collect()  # graphs and what they were made of refer to each other
        self.device.give_back()
        log.info("memory of %s in GiB: %s", self.device.name, plan.said())
        return plan

    def _steps(self) -> tuple[int, int]:
        """The largest step of all, and the graphs."""
        size = self.config.cache.page_size
        pages = 2 + -(-self.config.scheduler.step_tokens // size)
        pool = KVPool(shape_of(self.model), pages, size, self.device.torch_device)
        steps = self.device.peak(lambda: self._largest_step(pool))
        return steps, self._graphs(pool) + self._graphs_of_pictures()

    def _largest_step(self, pool: KVPool) -> None:
        """One prompt that fills a step, all of it under pictures, and as many logits as there may be."""
        rows, model = self.config.scheduler.step_tokens, self.model
        attention = self.attend(pool)
        attention.plan([Span(0, 0, rows, self._table(pool, rows))], rows)
        place = {"dtype": torch.int64, "device": self.device.torch_device}
        every = torch.arange(rows, **place)
        width = model.vision_token_bytes // model.dtype.itemsize
        features = torch.zeros(rows, width, dtype=model.dtype, device=self.device.torch_device)
        model.language.forward(
            ForwardInput(
                token_ids=torch.zeros(rows, **place),
                positions=every.repeat(3, 1),
                logit_rows=every[: self.config.scheduler.max_running + LOGIT_ROWS],
                attention=attention,
                vision=VisionRows(every, features.view(rows, -1, model.config.text.hidden_size)),
            )
        )

    def _largest_picture(self) -> None:
        """A square one of as many tokens as a batch may have, or as the pool can hold of one item."""
        vision = self.model.config.vision
        held = (self.config.cache.encoder_cache_mib << 20) // self.model.vision_token_bytes
        largest = min(held, self.model.config.max_position)
        side = max(isqrt(max(self.encoder_tokens, largest)), 1) * vision.merge_size
        pixels = torch.zeros(1, side * vision.patch_size, side * vision.patch_size, 3, dtype=torch.uint8)
        self.model.encoder.forward([pixels.to(self.device.torch_device)], [(side, side)])

    def _graphs(self, pool: KVPool) -> int:
        """Graphs share their memory but for their logits: the largest is captured, and the others' logits are
        counted."""
        attention = self.attend(pool)
        if self.config.runner.enforce_eager or not attention.capturable:
            return 0
        before = self.trial.graph_costs().nbytes
        graphs = StepGraphs(self.model.language, attention, self.trial, self.config.scheduler.max_running)
        graphs.prepare(graphs.decode_sizes[-1:])
        row = self.model.config.text.vocab_size * self.model.dtype.itemsize
        others = sum(graphs.decode_sizes[:-1]) * row + len(graphs.decode_sizes) * GRAPH_BYTES
        return self.trial.graph_costs().nbytes - before + others

    def _graphs_of_pictures(self) -> int:
        graphs = self.encoder_graphs
        if graphs is None:
            return 0
        before = self.trial.graph_costs().nbytes
        graphs.prepare(graphs.sizes[-1:])
        tokens = sum(graphs.sizes[:-1]) // graphs.patches
        others = tokens * self.model.vision_token_bytes + len(graphs.sizes) * GRAPH_BYTES
        return self.trial.graph_costs().nbytes - before + others

    def _table(self, pool: KVPool, tokens: int) -> PageTable:
        table = PageTable(pool.page_size)
        runs = pool.allocator.allocate(table.pages_missing(tokens))
        assert runs is not None
        table.extend(runs)
        return table


def shape_of(model: LoadedModel) -> KVShape:
    text = model.config.text
    return KVShape(text.num_layers, text.num_kv_heads, text.head_dim, model.dtype)


def pages_left(plan: MemoryPlan, shape: KVShape, page_size: int) -> int:
    """Pages that the KV pool gets, the dummy included; ConfigError when that is too few."""
    pages = min(plan.kv // shape.token_bytes, MOST_SLOTS) // page_size
    if pages < 2:
        raise ConfigError(
            f"the GPU has no memory left for keys and values (in GiB: {plan.said()}): raise gpu_memory_share,"
            " or lower step_tokens, max_running or encoder_cache_mib",
            param="gpu_memory_share",
        )
    return pages
