"""Decode steps over static buffers: one captured forward for each bucket of batch sizes."""

from bisect import bisect_left

import numpy as np
import torch

from mmserve.core.device import Device, Graph
from mmserve.engine.attention.base import AttentionBackend
from mmserve.engine.runner.devices import EagerGraph
from mmserve.engine.runner.inputs import FlatBatch
from mmserve.models.forward import ForwardInput, LanguageModel


def buckets_up_to(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ...: at most 8 padding rows."""
    sizes = [n for n in (1, 2, 4) if n < largest]
    return [*sizes, *range(8, largest, 8), largest] if largest > 1 else [1]


class DecodeGraphs:
    """Nothing but these buffers is read by a replay: token ids, positions and the attention plan.

    Rows beyond the batch are padding: token 0 at position 0, in no attention span. A bucket is captured
    when it is first needed. The logits of a replay are overwritten by the next one of any bucket.
    """

    def __init__(
        self, model: LanguageModel, attention: AttentionBackend, device: Device, largest: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.device = device
        self.buckets = buckets_up_to(largest)
        self.token_ids = torch.zeros(largest, dtype=torch.int64, device=device.torch_device)
        self.positions = torch.zeros(3, largest, dtype=torch.int64, device=device.torch_device)
        self._graphs: dict[int, Graph] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def run(self, flat: FlatBatch) -> torch.Tensor:
        """Logits [R, vocab] of the R rows of ``flat``, each a decode."""
        count = flat.num_rows
        bucket = self.buckets[bisect_left(self.buckets, count)]
        _fill(self.token_ids[:bucket], flat.token_ids)
        _fill(self.positions[:, :bucket], flat.positions)
        self.attention.plan(flat.spans, bucket)
        self._graph(bucket).replay()
        return self._logits[bucket][:count]

    def _graph(self, bucket: int) -> Graph:
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        return self._graphs[bucket]

    def _capture(self, bucket: int) -> Graph:
        inputs = ForwardInput(
            token_ids=self.token_ids[:bucket],
            positions=self.positions[:, :bucket],
            logit_rows=torch.arange(bucket, device=self.device.torch_device),
            attention=self.attention,
        )

        def forward() -> None:
            self._logits[bucket] = self.model.forward(inputs)

        return self.device.capture(forward) if self.attention.capturable else EagerGraph(forward)


def _fill(buffer: torch.Tensor, values: np.ndarray) -> None:
    count = values.shape[-1]
    buffer[..., :count].copy_(torch.from_numpy(values))
    buffer[..., count:] = 0
