"""Runs the language model on a scheduled batch."""

import numpy as np
import numpy.typing as npt
import torch

from mmserve.core.device import Device
from mmserve.engine.attention.base import AttentionBackend
from mmserve.engine.features import FeatureClaims
from mmserve.engine.runner.graphs import StepGraphs
from mmserve.engine.runner.inputs import Feed, FlatBatch, Place, vision_rows
from mmserve.engine.runner.staging import Fill, Staging
from mmserve.engine.scheduler.request import Batch
from mmserve.models.forward import ForwardInput, LanguageModel, VisionRows


class Runner:
    """Decodes, and small steps with prompts, go through static buffers; other steps through fresh tensors."""

    def __init__(
        self,
        model: LanguageModel,
        attention: AttentionBackend,
        claims: FeatureClaims,
        device: Device,
        max_decodes: int,
    ) -> None:
        self.model = model
        self.attention = attention
        self.claims = claims
        self.device = device
        self._staging = Staging(device)
        self.graphs = StepGraphs(model, attention, device, max_decodes)

    @torch.inference_mode()
    def run(self, batch: Batch, feed: Feed | None = None) -> torch.Tensor:
        """Logits [R, vocab] for the requests of ``batch`` that sample, in their order, and behind them the
        rows that its prompts want, chunk after chunk. ``feed`` sets the token ids of decodes that the host
        does not know."""
        flat = FlatBatch(batch)
        with self._staging.turn() as fill:
            place = self._placing(fill)
            vision = vision_rows(batch, flat.spans, self.claims, place)
            if self.graphs.takes(flat):
                return self.graphs.run(flat, fill, vision, feed)
            return self._run(flat, place, vision, feed)

    def _run(
        self, flat: FlatBatch, place: Place, vision: VisionRows | None, feed: Feed | None
    ) -> torch.Tensor:
        self.attention.plan(flat.spans, flat.num_rows)
        inputs = ForwardInput(
            token_ids=place(flat.token_ids),
            positions=place(flat.positions),
            logit_rows=place(flat.logit_rows),
            attention=self.attention,
            vision=vision,
        )
        if feed is not None:
            feed(inputs.token_ids)
        return self.model.forward(inputs)

    def _placing(self, fill: Fill) -> Place:
        """Makes tensors of the device by ``fill``; where the device shares the host's memory, of arrays as
        they are."""
        if self.device.synchronous:
            return torch.from_numpy

        def place(values: npt.NDArray[np.int64]) -> torch.Tensor:
            tensor = torch.empty(values.shape, dtype=torch.int64, device=self.device.torch_device)
            fill(tensor, values)
            return tensor

        return place
