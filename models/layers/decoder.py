"""One decoder layer, and what the decoders share around their stacks of layers."""

import torch
from torch import nn

from mmserve.models.config import ModelConfig, TextConfig
from mmserve.models.forward import Attention, ForwardInput
from mmserve.models.layers.attention import DecoderAttention
from mmserve.models.layers.base import Placement
from mmserve.models.layers.embedding import Embedding, head
from mmserve.models.layers.mlp import GatedMLP
from mmserve.models.layers.norm import RMSNorm
from mmserve.models.layers.rope import MRope, RopeTable


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward. The residual sum travels beside the branch that is to be added
    to it, so that every addition is fused with the norm that follows."""

    def __init__(self, config: TextConfig, layer: int, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.self_attn = DecoderAttention(config, layer, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, place)

    def forward(
        self,
        branch: torch.Tensor | None,
        residual: torch.Tensor,
        rope: RopeTable,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual) of the layer below to those of this one; no branch below the first. Given
        ``rows``, only theirs: keys and values of all are stored, what lies behind attention is not computed.
        """
        if branch is None:
            normed = self.input_layernorm(residual)
        else:
            normed, residual = self.input_layernorm.add(branch, residual)
        branch = self.self_attn(normed, rope, attention, rows)
        if rows is not None:
            residual = residual.index_select(0, rows)
        normed, residual = self.post_attention_layernorm.add(branch, residual)
        return self.mlp(normed), residual


class Decoder(nn.Module):
    """Embeddings, layers, last norm and head. Families add their ``forward``."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        text = config.text
        self.ops = place.ops
        self.embed_tokens = Embedding(text.vocab_size, text.hidden_size, place)
        self.layers = nn.ModuleList(DecoderLayer(text, i, place) for i in range(text.num_layers))
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, place)
        self.lm_head = head(self.embed_tokens, config.tie_word_embeddings, place)
        self.rope = MRope(text, place)

    def embed(self, inputs: ForwardInput) -> torch.Tensor:
        """Token embeddings [T, hidden], those under vision items replaced by the encoder's."""
        hidden = self.embed_tokens(inputs.token_ids)
        if inputs.vision is not None:
            self.ops.scatter_rows(hidden, inputs.vision.rows, inputs.vision.features[:, 0])
        return hidden

    def logits(
        self, branch: torch.Tensor | None, residual: torch.Tensor, rope: RopeTable, inputs: ForwardInput
    ) -> torch.Tensor:
        """The last layer and the head: logits [R, vocab] of the wanted rows. The others end with the keys and
        values that they leave for later tokens."""
        branch, residual = self.layers[-1](branch, residual, rope, inputs.attention, inputs.logit_rows)
        hidden, _ = self.norm.add(branch, residual)
        return self.lm_head(hidden)
