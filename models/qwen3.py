"""The decoder of Qwen3-VL: norm on q and k, interleaved M-RoPE, deepstack."""

import torch

from mmserve.models.forward import ForwardInput, VisionRows
from mmserve.models.layers.decoder import Decoder


class Qwen3(Decoder):
    def forward(self, inputs: ForwardInput) -> torch.Tensor:
        """See ``models.forward.LanguageModel``."""
        residual = self.embed(inputs)
        rope = self.rope(inputs.positions, residual.dtype)
        branch: torch.Tensor | None = None
        for i, layer in enumerate(self.layers[:-1]):
            branch, residual = layer(branch, residual, rope, inputs.attention)
            self._deepstack(branch, i, inputs.vision)
        return self.logits(branch, residual, rope, inputs)

    def _deepstack(self, branch: torch.Tensor, layer: int, vision: VisionRows | None) -> None:
        """Add feature ``1 + layer`` to the rows under vision items after each of the first D layers, of which
        the last is none (``read_config``).

        DeepStack, https://arxiv.org/abs/2406.04334.
        """
        if vision is not None and layer + 1 < vision.features.shape[1]:
            self.ops.scatter_add_rows(branch, vision.rows, vision.features[:, 1 + layer])
