"""Steps over static buffers: one captured forward for each bucket of them."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mmserve.core.device import Device, Graph
from mmserve.engine.attention.base import AttentionBackend
from mmserve.engine.runner.devices import EagerGraph
from mmserve.engine.runner.inputs import Feed, FlatBatch
from mmserve.engine.runner.staging import Fill
from mmserve.models.forward import ForwardInput, LanguageModel, VisionRows


class Bucket(NamedTuple):
    """Steps that one captured forward computes."""

    rows: int
    logits: int  # of so many rows
    form: str  # of attention's plan
    decodes: bool = True  # all rows are, and have logits; else there are prompts among them
    vision: bool = False  # some rows stand under vision items


def buckets_up_to(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ...: at most 8 padding rows."""
    sizes = [n for n in (1, 2, 4) if n < largest]
    return [*sizes, *range(8, largest, 8), largest] if largest > 1 else [1]


class StepGraphs:
    """Decodes of any number up to ``max_decodes``, and small steps with prompts where attention says that its
    plan of them may be captured.

    A replay reads nothing but these buffers and attention's: token ids, positions, rows with logits, and for
    vision items rows and features. Rows beyond the batch are padding: token 0 at position 0, in no attention
    span; logits beyond those wanted are of row 0, and features beyond those that come go to row -1, which is
    nowhere. A bucket is captured when it is first needed. The logits of a replay are overwritten by the next
    one of any bucket.
    """

    def __init__(
        self, model: LanguageModel, attention: AttentionBackend, device: Device, max_decodes: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.device = device
        self.decode_sizes = buckets_up_to(max_decodes)
        self._most = max(max_decodes, attention.captured_rows)
        self.token_ids = self._zeros(self._most)
        self.positions = self._zeros(3, self._most)
        self.logit_rows = self._zeros(self._most)
        self._vision: VisionRows | None = None  # made when the first features come, of their width
        self._graphs: dict[Bucket, Graph] = {}
        self._logits: dict[Bucket, torch.Tensor] = {}

    def takes(self, flat: FlatBatch) -> bool:
        """Whether there is, or may be made, a graph for this step. Without logits it is left alone: a graph
        would compute some."""
        if flat.decodes_only:
            return True
        return 0 < len(flat.logit_rows) <= flat.num_rows <= self.attention.captured_rows

    def run(
        self, flat: FlatBatch, fill: Fill, vision: VisionRows | None = None, feed: Feed | None = None
    ) -> torch.Tensor:
        """Logits [R, vocab] of the wanted rows of ``flat``, under whose vision items come ``vision``. Arrays
        reach the buffers by ``fill``; then ``feed`` sets the token ids that are not known to the host."""
        self.attention.plan(flat.spans, self._rows(flat))
        bucket = self._bucket(flat, vision)
        _fill(fill, self.token_ids[: bucket.rows], flat.token_ids)
        _fill(fill, self.positions[:, : bucket.rows], flat.positions)
        if not bucket.decodes:
            _fill(fill, self.logit_rows[: bucket.logits], flat.logit_rows)
        if vision is not None:
            self._fill_vision(vision)
        if feed is not None:
            feed(self.token_ids)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self._graphs[bucket] = self._capture(bucket)
        return self._logits[bucket][: len(flat.logit_rows)]

    @torch.inference_mode()
    def prepare(self, sizes: Iterable[int] | None = None) -> None:
        """Capture ``sizes`` of decodes beforehand (all if not given), the largest first; those that are there
        are passed over."""
        for size in sorted(self.decode_sizes if sizes is None else sizes, reverse=True):
            self.attention.plan([], size)
            bucket = Bucket(size, size, self.attention.form)
            if bucket not in self._graphs:
                self._graphs[bucket] = self._capture(bucket)

    def again(self, rows: int) -> None:
        """A step of ``rows`` decodes over the buffers as they stand, for whoever measures it; StopIteration
        where there was none."""
        self._graphs[next(b for b in self._graphs if b.decodes and b.rows == rows)].replay()

    def _rows(self, flat: FlatBatch) -> int:
        return _at_least(flat.num_rows, self.decode_sizes) if flat.decodes_only else flat.num_rows

    def _bucket(self, flat: FlatBatch, vision: VisionRows | None) -> Bucket:
        """Of the step that attention has planned."""
        rows = self._rows(flat)
        if flat.decodes_only:
            return Bucket(rows, rows, self.attention.form)
        logits = _at_least(len(flat.logit_rows), buckets_up_to(self._most))
        return Bucket(rows, logits, self.attention.form, decodes=False, vision=vision is not None)

    def _capture(self, bucket: Bucket) -> Graph:
        """The forward of ``bucket``, which has run once when this returns."""
        inputs = ForwardInput(
            token_ids=self.token_ids[: bucket.rows],
            positions=self.positions[:, : bucket.rows],
            logit_rows=self._all_rows(bucket.rows) if bucket.decodes else self.logit_rows[: bucket.logits],
            attention=self.attention,
            vision=self._vision_of(bucket.rows) if bucket.vision else None,
        )

        def forward() -> None:
            self._logits[bucket] = self.model.forward(inputs)

        if self.attention.capturable:
            return self.device.capture(forward)
        forward()
        return EagerGraph(forward)

    # ------------------------------------------------------------ buffers

    def _fill_vision(self, vision: VisionRows) -> None:
        count = len(vision.rows)
        if self._vision is None:
            features = vision.features.new_zeros(self._most, *vision.features.shape[1:])
            self._vision = VisionRows(self._zeros(self._most), features)
        self._vision.rows[:count] = vision.rows
        self._vision.rows[count:] = -1
        self._vision.features[:count] = vision.features

    def _vision_of(self, rows: int) -> VisionRows:
        assert self._vision is not None
        return VisionRows(self._vision.rows[:rows], self._vision.features[:rows])

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self.device.torch_device)

    def _all_rows(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.device.torch_device)


def _at_least(count: int, sizes: list[int]) -> int:
    return sizes[bisect_left(sizes, count)]


def _fill(fill: Fill, buffer: torch.Tensor, values: npt.NDArray[np.int64]) -> None:
    count = values.shape[-1]
    fill(buffer[..., :count], values)
    if count < buffer.shape[-1]:
        buffer[..., count:] = 0
