"""The same random weights in transformers and in mmserve, and the same prompts for both.

Configurations are tiny and keep every feature: grouped queries, M-RoPE sections, windows, learned
positions, deepstack, tied and untied heads, biases.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import transformers
from helpers.dense_attention import DenseAttention

from mmserve.core.config import ModelOptions
from mmserve.models.config import Normalization, read_normalization
from mmserve.models.forward import ForwardInput, VisionRows
from mmserve.models.registry import load_model

IMAGE, VIDEO, START, END = 90, 91, 92, 93
VOCAB = 96
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
CONTIGUOUS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
INTERLEAVED = {
    "rope_type": "default",
    "rope_theta": 50000.0,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}
VISION2 = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
VISION25 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 60,
    "out_hidden_size": 64,
    "num_heads": 2,
    "fullatt_block_indexes": [1],
    "window_size": 112,
    "tokens_per_second": 2,
}
VISION3 = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3_TEXT = {**TEXT, "head_dim": 32, "rope_parameters": INTERLEAVED}
QWEN2_TEXT = {**TEXT, "rope_parameters": CONTIGUOUS}
# name -> (transformers prefix, text, vision, tied)
MODELS = {
    "qwen2_vl": ("Qwen2VL", QWEN2_TEXT, VISION2, False),
    "qwen2_vl-tied": ("Qwen2VL", QWEN2_TEXT, VISION2, True),
    "qwen2_5_vl": ("Qwen2_5_VL", QWEN2_TEXT, VISION25, True),
    "qwen3_vl": ("Qwen3VL", QWEN3_TEXT, VISION3, True),
    "qwen3_vl-untied-bias": ("Qwen3VL", {**QWEN3_TEXT, "attention_bias": True}, VISION3, False),
}


def make_reference(name, seed=0):
    """A transformers model of ``MODELS`` with random weights of unit scale, float32."""
    prefix, text, vision, tied = MODELS[name]
    kind = getattr(transformers, prefix + "Config")
    config = kind(text_config=text, vision_config=vision, tie_word_embeddings=tied, **IDS)
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + "ForConditionalGeneration")(config).eval()
    for key, value in model.named_parameters():
        value.data = _random(key, value)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def _random(name, like):
    """Values that bf16 holds exactly, so that both dtypes compute with the same numbers."""
    if like.dim() == 1:
        value = (1.0 if name.endswith("weight") else 0.0) + 0.1 * torch.randn(like.shape)
    elif "embed_tokens" in name or "pos_embed" in name:
        value = 0.5 * torch.randn(like.shape)
    else:
        value = torch.randn(like.shape) * like[0].numel() ** -0.5
    return value.bfloat16().float()


class Pair:
    """One model on both sides; ``load`` takes any options of ``ModelOptions``."""

    def __init__(self, name, folder, dtype="float32", **options):
        self.name = name
        self.reference = make_reference(name)
        self.folder = folder
        self.reference.save_pretrained(folder)
        self.reference.to(getattr(torch, dtype))
        self.model = load_model(ModelOptions(model=str(folder), dtype=dtype), **options)
        self.vision = self.model.config.vision

    @cached_property
    def normalization(self) -> Normalization:
        return read_normalization(self.folder, self.model.config.family)

    # ------------------------------------------------------------ prompts

    def prompt(self, *parts, seed=0):
        """A ``Prompt`` of parts: an int (that many text tokens), ("image", h, w) or ("video", t, h, w)."""
        rng = np.random.default_rng(seed)
        prompt = Prompt([], [], [], [], [])
        for part in parts:
            if isinstance(part, int):
                prompt.text(rng.integers(0, 80, part).tolist())
            elif part[0] == "image":
                prompt.text([START])
                self._media(prompt, IMAGE, 1, part[1:], rng)
                prompt.text([END])
            else:
                self._video(prompt, part[1:], rng)
        return prompt

    def _video(self, prompt, shape, rng):
        """Qwen3-VL: a text timestamp and brackets for each frame pair. The others: one run of tokens."""
        count, *grid = shape
        apart = self.model.config.family == "qwen3_vl"
        prompt.video_grids.append((count, *grid))
        for i in range(count):
            if apart:
                prompt.text(rng.integers(0, 80, 3).tolist())
            if apart or i == 0:
                prompt.text([START])
            self._media(prompt, VIDEO, 2, grid, rng)
            if apart or i == count - 1:
                prompt.text([END])

    def _media(self, prompt, token, frames, grid, rng):
        size = [frames, *(n * self.vision.patch_size for n in grid), 3]
        pixels = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
        count = grid[0] * grid[1] // self.vision.merge_size**2
        prompt.items.append((token, pixels, tuple(grid)))
        prompt.rows.extend(range(len(prompt.ids), len(prompt.ids) + count))
        prompt.ids.extend([token] * count)
        if token == IMAGE:
            prompt.image_grids.append((1, *grid))

    # ------------------------------------------------------------ transformers

    def reference_inputs(self, prompt):
        """Keyword arguments for the transformers model."""
        ids = torch.tensor([prompt.ids])
        kinds = torch.zeros_like(ids)
        kinds[ids == IMAGE], kinds[ids == VIDEO] = 1, 2
        inputs = {"input_ids": ids, "mm_token_type_ids": kinds}
        dtype = self.reference.dtype
        if prompt.image_grids:
            inputs["image_grid_thw"] = torch.tensor(prompt.image_grids)
            inputs["pixel_values"] = self.pixel_values(prompt, IMAGE).to(dtype)
        if prompt.video_grids:
            inputs["video_grid_thw"] = torch.tensor(prompt.video_grids)
            inputs["pixel_values_videos"] = self.pixel_values(prompt, VIDEO).to(dtype)
        return inputs

    def pixel_values(self, prompt, token):
        return torch.cat([self.plain_patches(p, g) for t, p, g in prompt.items if t == token])

    def plain_patches(self, pixels, grid):
        """The checkpoint's own preprocessing of one item: [h * w, 3 * 2 * patch * patch], float32."""
        mean, std = torch.tensor(self.normalization.mean), torch.tensor(self.normalization.std)
        values = (pixels.float() / 255 - mean) / std
        frames = values.expand(2, *values.shape[1:]) if len(values) == 1 else values
        (h, w), m, p = grid, self.vision.merge_size, self.vision.patch_size
        blocks = frames.reshape(2, h // m, m, p, w // m, m, p, 3).permute(1, 4, 2, 5, 7, 0, 3, 6)
        return blocks.reshape(h * w, -1)

    def positions(self, prompt):
        """(positions [3, N], delta) as transformers has them."""
        inputs = self.reference_inputs(prompt)
        found, delta = self.reference.model.get_rope_index(
            **{k: v for k, v in inputs.items() if not k.startswith("pixel")}
        )
        return found[:, 0], int(delta)

    def reference_logits(self, prompt):
        positions, _ = self.positions(prompt)
        with torch.no_grad():
            return self.reference(
                **self.reference_inputs(prompt), position_ids=positions[:, None], use_cache=False
            ).logits[0]

    def reference_greedy(self, prompt, count):
        with torch.no_grad():
            inputs = self.reference_inputs(prompt)
            out = self.reference.generate(**inputs, max_new_tokens=count, do_sample=False)
        return out[0, len(prompt.ids) :].tolist()

    # ------------------------------------------------------------ mmserve

    def encode(self, prompts):
        """One encoder forward over the items of all prompts: features [V, 1 + D, hidden] of each prompt."""
        items = [item for prompt in prompts for item in prompt.items]
        if not items:
            return [None] * len(prompts)
        features = iter(self.model.encoder.forward([p for _, p, _ in items], [g for _, _, g in items]))
        return [torch.cat([next(features) for _ in p.items]) if p.items else None for p in prompts]

    def forward(self, prompts, attention, every_row=True):
        """Logits of one prefill of all ``prompts``: of every row or of each prompt's last."""
        starts = np.cumsum([0, *(len(p.ids) for p in prompts)])
        features = self.encode(prompts)
        rows = [torch.tensor(p.rows) + int(s) for p, s in zip(prompts, starts, strict=False) if p.rows]
        vision = (
            VisionRows(torch.cat(rows), torch.cat([f for f in features if f is not None])) if rows else None
        )
        inputs = ForwardInput(
            token_ids=torch.tensor([t for p in prompts for t in p.ids]),
            positions=torch.cat([self.positions(p)[0] for p in prompts], 1),
            logit_rows=torch.arange(starts[-1]) if every_row else torch.tensor(starts[1:]) - 1,
            attention=attention,
            vision=vision,
        )
        return self.model.language.forward(inputs)

    def logits(self, *prompts):
        """Logits [N, vocab] of each prompt, all prefilled in one forward."""
        lengths = [len(p.ids) for p in prompts]
        return self.forward(prompts, DenseAttention(lengths)).split(lengths)

    def greedy(self, prompts, count):
        """``count`` greedy tokens of each prompt, decoded as one batch."""
        attention = DenseAttention(len(p.ids) for p in prompts)
        token = self.forward(prompts, attention, every_row=False).argmax(-1)
        chosen = [token]
        attention.step([1] * len(prompts))
        place = torch.tensor([len(p.ids) + self.positions(p)[1] for p in prompts])
        for _ in range(count - 1):
            rows = torch.arange(len(prompts))
            inputs = ForwardInput(token, place.expand(3, -1).contiguous(), rows, attention)
            token = self.model.language.forward(inputs).argmax(-1)
            chosen.append(token)
            place = place + 1
        return torch.stack(chosen, 1).tolist()


@dataclass
class Prompt:
    """Token ids, the rows under vision items, (token, pixels, grid) of each item, and transformers' grids."""

    ids: list
    rows: list
    items: list
    image_grids: list
    video_grids: list

    def text(self, ids):
        self.ids.extend(ids)
