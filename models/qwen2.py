"""The decoder of Qwen2-VL and Qwen2.5-VL: bias on q, k and v, contiguous M-RoPE."""

import torch

from mmserve.models.forward import ForwardInput
from mmserve.models.layers.decoder import Decoder


class Qwen2(Decoder):
    def forward(self, inputs: ForwardInput) -> torch.Tensor:
        """See ``models.forward.LanguageModel``."""
        residual = self.embed(inputs)
        rope = self.rope(inputs.positions, residual.dtype)
        branch: torch.Tensor | None = None
        for layer in self.layers[:-1]:
            branch, residual = layer(branch, residual, rope, inputs.attention)
        return self.logits(branch, residual, rope, inputs)
