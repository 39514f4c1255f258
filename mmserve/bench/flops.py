"""The work of a forward, counted from the model's configuration: floating-point operations and bytes.

A product of [m, k] with [k, n] counts 2 m k n. Norms, activations, rotary positions and softmax are left out:
they are far below a hundredth, and no matrix rate applies to them.
"""

from collections.abc import Iterable

from mmserve.models.config import ModelConfig, TextConfig, VisionConfig

Grid = tuple[int, int]  # (h, w) of one vision item, in patches


# ---------------------------------------------------------------- decoder


def every_weights(text: TextConfig) -> int:
    """Elements of the matrices that every token of a prompt meets: all but those of ``sampled_weights``."""
    return text.num_layers * _before_attention(text) + (text.num_layers - 1) * _behind_attention(text)


def sampled_weights(text: TextConfig) -> int:
    """Elements of the matrices that only tokens meet whose logits are wanted: what lies behind the attention
    of the last layer, and the head."""
    return _behind_attention(text) + text.hidden_size * text.vocab_size


def _before_attention(text: TextConfig) -> int:
    return text.hidden_size * (text.num_heads + 2 * text.num_kv_heads) * text.head_dim


def _behind_attention(text: TextConfig) -> int:
    return text.hidden_size * (text.num_heads * text.head_dim + 3 * text.intermediate_size)


def attention_flops(text: TextConfig, start: int, stop: int) -> int:
    """Causal attention of tokens [start, stop): token t meets t + 1 keys and as many values."""
    keys = (start + 1 + stop) * (stop - start) // 2
    return text.num_layers * 4 * text.num_heads * text.head_dim * keys


def prefill_flops(config: ModelConfig, tokens: int, cached: int = 0) -> int:
    """A prompt of ``tokens``, the first ``cached`` of which are there already, and the logits of its last."""
    text = config.text
    linear = 2 * every_weights(text) * (tokens - cached) + 2 * sampled_weights(text)
    return linear + attention_flops(text, cached, tokens)


def decode_flops(config: ModelConfig, context: int, tokens: int = 1) -> int:
    """``tokens`` generated one by one, the first of which sees ``context`` tokens and itself."""
    text = config.text
    linear = 2 * (every_weights(text) + sampled_weights(text)) * tokens
    return linear + attention_flops(text, context, context + tokens)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """What a decode step must read of the weights, whatever its batch: all layers, and the head."""
    return (every_weights(config.text) + sampled_weights(config.text)) * itemsize


def bytes_of_weight(dtype_bytes: int, quantization: str) -> int:
    """Of one weight of a layer; scales, one a row, are left out."""
    return 1 if quantization == "int8" else dtype_bytes


def kv_bytes(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token."""
    text = config.text
    return text.num_layers * 2 * text.num_kv_heads * text.head_dim * itemsize


# ---------------------------------------------------------------- encoder


def encoder_flops(config: ModelConfig, grids: Iterable[Grid], frames: int = 1) -> int:
    """Vision items of ``grids``, of ``frames`` frames each: 1 for a still, whose frame is embedded once."""
    return sum(_item_flops(config, grid, frames) for grid in grids)


def _item_flops(config: ModelConfig, grid: Grid, frames: int) -> int:
    vision, patches = config.vision, grid[0] * grid[1]
    embedding = frames * vision.in_channels * vision.patch_size**2 * vision.hidden_size
    return (
        2 * patches * (embedding + vision.depth * _block_weights(config))
        + _vision_attention_flops(vision, grid)
        + 2 * patches // vision.merge_size**2 * _merger_weights(vision) * config.feature_rows
    )


def _block_weights(config: ModelConfig) -> int:
    vision = config.vision
    matrices = 3 if config.family == "qwen2_5_vl" else 2  # its feed-forward is gated
    return vision.hidden_size * (4 * vision.hidden_size + matrices * vision.intermediate_size)


def _merger_weights(vision: VisionConfig) -> int:
    width = vision.hidden_size * vision.merge_size**2
    return width * (width + vision.out_hidden_size)


def _vision_attention_flops(vision: VisionConfig, grid: Grid) -> int:
    """Full attention over an item, or within windows where the block has them."""
    patches = grid[0] * grid[1]
    if vision.window_size is None:
        return 4 * vision.hidden_size * vision.depth * patches**2
    whole = len(vision.full_attention_layers)
    side = vision.window_size // vision.patch_size
    windowed = sum((h * w) ** 2 for h in _cuts(grid[0], side) for w in _cuts(grid[1], side))
    return 4 * vision.hidden_size * (whole * patches**2 + (vision.depth - whole) * windowed)


def _cuts(length: int, side: int) -> list[int]:
    """``length`` in pieces of ``side``, the last of which may be shorter."""
    return [min(side, length - start) for start in range(0, length, side)]
