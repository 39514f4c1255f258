"""Runs the language model on a scheduled batch."""

import torch

from mmserve.core.device import Device
from mmserve.engine.attention.base import AttentionBackend
from mmserve.engine.features import FeatureClaims
from mmserve.engine.runner.decode import DecodeGraphs
from mmserve.engine.runner.inputs import FlatBatch, vision_rows
from mmserve.engine.scheduler.request import Batch
from mmserve.models.forward import ForwardInput, LanguageModel


class Runner:
    """Batches of decodes alone go through static buffers, mixed ones through fresh tensors."""

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
        self.decodes = DecodeGraphs(model, attention, device, max_decodes)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] for the requests of ``batch`` that sample, in their order, and behind them the
        rows that its prompts want, chunk after chunk."""
        flat = FlatBatch(batch)
        if not batch.prompts:
            return self.decodes.run(flat)
        return self._run_mixed(batch, flat)

    def _run_mixed(self, batch: Batch, flat: FlatBatch) -> torch.Tensor:
        device = self.device.torch_device
        self.attention.plan(flat.spans, flat.num_rows)
        return self.model.forward(
            ForwardInput(
                token_ids=torch.from_numpy(flat.token_ids).to(device),
                positions=torch.from_numpy(flat.positions).to(device),
                logit_rows=torch.from_numpy(flat.logit_rows).to(device),
                attention=self.attention,
                vision=vision_rows(batch, flat.spans, self.claims, device),
            )
        )
