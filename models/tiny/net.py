"""tiny-vl for training: the Qwen3-VL forward, written for batches whose vision items share one grid.

Parameter names are those of transformers' ``Qwen3VLForConditionalGeneration`` (without the tied
``lm_head``), so a state dict moves between the two unchanged. What differs is cost only: all items of
a batch go through the vision blocks as one tensor, a still picture's frame is embedded once with the
two temporal halves of the kernel summed, and logits are computed at supervised positions alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]  # patch rows and columns of one frame (pair); both even


@dataclass(frozen=True, slots=True)
class Rows:
    """Right-padded token rows of about one length.

    ``slots`` [V] are flat positions of vision tokens in ``ids`` [B, L]; ``sources`` [V] says which token
    of the batch's encoded items [N*patches/4] each one is, so that rows may share a picture. ``wanted``
    [S] are the flat positions whose next token is to be predicted. ``positions`` is [3, B, L].
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    sources: Tensor
    wanted: Tensor


class Linear(nn.Linear):
    """A linear layer that starts from a normal distribution of fan-in variance and a zero bias."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.5 / math.sqrt(self.in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [..., D] with half-width tables ``cos``, ``sin`` [..., D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def merge_order(rows: int, cols: int, merge: int = 2) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, in the order of ``merge`` x ``merge`` blocks that the merger reads."""
    index = torch.arange(rows * cols).view(rows // merge, merge, cols // merge, merge)
    index = index.permute(0, 2, 1, 3).reshape(-1)
    return index // cols, index % cols


@lru_cache(maxsize=256)
def position_weights(grid: Grid, side: int) -> Tensor:
    """Bilinear resampling (corners aligned) of a ``side`` x ``side`` table to ``grid``: [patches, side^2]."""
    axes = []
    for size, index in zip(grid, merge_order(*grid), strict=True):
        source = torch.linspace(0, side - 1, size)[index]
        low = source.floor().long()
        weights = torch.zeros(len(index), side + 1)
        weights[torch.arange(len(index)), low] = 1 - (source - low)
        weights[torch.arange(len(index)), low + 1] += source - low
        axes.append(weights[:, :side])
    return torch.einsum("pi,pj->pij", *axes).reshape(-1, side * side)


@lru_cache(maxsize=256)
def axial_tables(grid: Grid, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the vision rotary embedding, each [1, patches, 1, head_dim/2]: rows, then columns."""
    half = head_dim // 2
    freq = 1.0 / 10000.0 ** (torch.arange(0, half, 2).float() / half)
    rows, cols = merge_order(*grid)
    angle = torch.cat((rows[:, None] * freq, cols[:, None] * freq), dim=-1)[None, :, None]
    return angle.cos(), angle.sin()


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention over [B, H, L, D] by plain products, which beat SDPA on a CPU at these lengths."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        length = q.shape[-2]
        scores = scores + torch.full((length, length), -30000.0, dtype=q.dtype).triu(1)
    return torch.softmax(scores, dim=-1) @ v


class VisionAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(size, 3 * size)
        self.proj = Linear(size, size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, p, size = x.shape
        q, k, v = self.qkv(x).view(n, p, 3, self.heads, -1).unbind(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(out.transpose(1, 2).reshape(n, p, size))


class VisionMLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = Linear(size, inner)
        self.linear_fc2 = Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, size: int, inner: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size, eps=1e-6)
        self.norm2 = nn.LayerNorm(size, eps=1e-6)
        self.attn = VisionAttention(size, heads)
        self.mlp = VisionMLP(size, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four neighbouring patches to one language token; ``after`` normalises the four together."""

    def __init__(self, size: int, out: int, after: bool) -> None:
        super().__init__()
        self.inner, self.after = 4 * size, after
        self.norm = nn.LayerNorm(self.inner if after else size, eps=1e-6)
        self.linear_fc1 = Linear(self.inner, self.inner)
        self.linear_fc2 = Linear(self.inner, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.reshape(-1, self.inner)) if self.after else self.norm(x).reshape(-1, self.inner)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    def __init__(self, size: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, size, kernel_size=(2, patch, patch), stride=(2, patch, patch))

    def forward(self, patches: Tensor) -> Tensor:
        """uint8 [..., 3*16*16] (a still) or [..., 3*2*16*16] (a frame pair), channels first."""
        weight = self.proj.weight
        pixels = (patches.float() * (2 / 255) - 1).to(weight.dtype)
        still = patches.shape[-1] * 2 == weight[0].numel()
        kernel = (weight.sum(2) if still else weight).flatten(1)
        return F.linear(pixels, kernel, self.proj.bias)


class Vision(nn.Module):
    def __init__(self, cfg: dict) -> None:
        super().__init__()
        size, self.heads = cfg["hidden_size"], cfg["num_heads"]
        self.side = math.isqrt(cfg["num_position_embeddings"])
        self.taps = tuple(cfg["deepstack_visual_indexes"])
        self.patch_embed = PatchEmbed(size, cfg["patch_size"])
        self.pos_embed = nn.Embedding(self.side**2, size)
        nn.init.normal_(self.pos_embed.weight, std=0.02)
        inner = cfg["intermediate_size"]
        self.blocks = nn.ModuleList(VisionBlock(size, inner, self.heads) for _ in range(cfg["depth"]))
        self.merger = Merger(size, cfg["out_hidden_size"], after=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(size, cfg["out_hidden_size"], after=True) for _ in self.taps
        )

    def forward(self, patches: Tensor, grid: Grid) -> tuple[Tensor, list[Tensor]]:
        """[N, patches, pixels] to language tokens [N*patches/4, H] and the deepstack features alike."""
        x = self.patch_embed(patches)
        weights = position_weights(grid, self.side).to(x.dtype)
        x = x + weights @ self.pos_embed.weight
        cos, sin = (t.to(x.dtype) for t in axial_tables(grid, x.shape[-1] // self.heads))
        deep = []
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if layer in self.taps:
                deep.append(self.deepstack_merger_list[self.taps.index(layer)](x))
        return self.merger(x), deep


class TextAttention(nn.Module):
    def __init__(self, cfg: dict) -> None:
        super().__init__()
        size, self.head_dim = cfg["hidden_size"], cfg["head_dim"]
        self.heads, self.kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
        self.q_proj = Linear(size, self.heads * self.head_dim, bias=False)
        self.k_proj = Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(self.heads * self.head_dim, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, cfg["rms_norm_eps"])
        self.k_norm = RMSNorm(self.head_dim, cfg["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, length, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(b, length, self.heads, -1)), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x).view(b, length, self.kv_heads, -1)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(b, length, self.kv_heads, -1).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = attend(q, k, v, causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, length, -1))


class TextMLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(size, inner, bias=False)
        self.up_proj = Linear(size, inner, bias=False)
        self.down_proj = Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, cfg: dict) -> None:
        super().__init__()
        self.self_attn = TextAttention(cfg)
        self.mlp = TextMLP(cfg["hidden_size"], cfg["intermediate_size"])
        self.input_layernorm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Text(nn.Module):
    def __init__(self, cfg: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg["vocab_size"], cfg["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(TextLayer(cfg) for _ in range(cfg["num_hidden_layers"]))
        self.norm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.head_dim = cfg["head_dim"]
        self.theta = cfg["rope_parameters"]["rope_theta"]
        self.section = cfg["rope_parameters"]["mrope_section"]

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Interleaved M-RoPE: positions [3, B, L] to cos and sin [B, L, 1, head_dim/2]."""
        half = self.head_dim // 2
        axis = torch.zeros(half, dtype=torch.long)
        axis[1 : 3 * self.section[1] : 3] = 1
        axis[2 : 3 * self.section[2] : 3] = 2
        freq = 1.0 / self.theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
        angle = positions.float()[axis].permute(1, 2, 0) * freq
        return angle.cos()[:, :, None], angle.sin()[:, :, None]

    def forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, vision: Tensor, deep: list[Tensor]
    ) -> Tensor:
        """``vision`` [V, H] replaces those at flat ``slots``; ``deep`` goes in after the first layers."""
        b, length = ids.shape
        x = self.embed_tokens(ids).view(b * length, -1).index_copy(0, slots, vision).view(b, length, -1)
        cos, sin = (t.to(x.dtype) for t in self.tables(positions))
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin)
            if index < len(deep):
                x = x.view(b * length, -1).index_add(0, slots, deep[index]).view(b, length, -1)
        return x


class Towers(nn.Module):
    """The two halves, under the names that transformers gives them."""

    def __init__(self, cfg: dict) -> None:
        super().__init__()
        self.visual = Vision(cfg["vision_config"])
        self.language_model = Text(cfg["text_config"])


class TinyVL(nn.Module):
    """``cfg`` is the dictionary of config.json (see ``checkpoint.config``)."""

    def __init__(self, cfg: dict) -> None:
        super().__init__()
        self.answer_loss = answer_loss
        self.model = Towers(cfg)

    def speed_up(self) -> None:
        compile_blocks(self)
        self.answer_loss = torch.compile(answer_loss, dynamic=True)

    def hidden(self, patches: Tensor, grid: Grid, groups: Sequence[Rows]) -> Tensor:
        """Last hidden states, before the final norm, at the wanted positions of each group in turn."""
        vision, deep = self.model.visual(patches, grid)
        text = self.model.language_model
        out = []
        for rows in groups:
            features = [d[rows.sources] for d in deep]
            x = text(rows.ids, rows.positions, rows.slots, vision[rows.sources], features)
            out.append(x.flatten(0, 1)[rows.wanted])
        return torch.cat(out)

    def forward(self, patches: Tensor, grid: Grid, groups: Sequence[Rows]) -> Tensor:
        """Logits [S, vocab] at the wanted positions of each group of rows in turn."""
        text = self.model.language_model
        return F.linear(text.norm(self.hidden(patches, grid, groups)), text.embed_tokens.weight)

    def batch_loss(self, batch: Any) -> Tensor:
        """``loss`` of a ``batches.Batch``."""
        return self.loss(batch.patches, batch.grid, batch.groups, batch.targets, batch.weights)

    def loss(
        self, patches: Tensor, grid: Grid, groups: Sequence[Rows], targets: Tensor, weights: Tensor
    ) -> Tensor:
        """Weighted mean cross-entropy of the next tokens at the wanted positions."""
        text = self.model.language_model
        hidden = self.hidden(patches, grid, groups)
        return self.answer_loss(
            hidden, text.norm.weight, text.norm.eps, text.embed_tokens.weight, targets, weights
        )


def compile_blocks(net: nn.Module) -> None:
    """Compile the blocks for any batch size and length (about three times faster on a CPU)."""
    for module in net.modules():
        if isinstance(module, (VisionBlock, TextLayer, Merger)):
            module.compile(dynamic=True)


def answer_loss(
    hidden: Tensor, scale: Tensor, eps: float, table: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    x = hidden.float()
    x = scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)
    each = F.cross_entropy(F.linear(x, table).float(), targets, reduction="none")
    return (each * weights).sum() / weights.sum()
