"""A checkpoint's config.json as frozen dataclasses. No torch: `doctor` and the launcher read configs too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.core.errors import ModelLoadError

FAMILIES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
# Qwen2-VL's processors normalise as CLIP's do; Qwen3-VL's to [-1, 1].
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class TextConfig:
    """Shape of the decoder. ``mrope_section``: rotary frequencies given to (time, height, width)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    mrope_interleaved: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    max_position: int


@dataclass(frozen=True)
class VisionConfig:
    """Shape of the vision transformer; sizes in pixels (``patch_size``, ``window_size``) or patches.

    ``deepstack_layers``: after which blocks features are taken for the decoder's first layers.
    ``full_attention_layers``: the blocks without windows (all of them where there are none).
    """

    hidden_size: int
    intermediate_size: int
    out_hidden_size: int
    depth: int
    num_heads: int
    hidden_act: str
    patch_size: int
    merge_size: int
    in_channels: int
    rope_theta: float
    num_position_embeddings: int | None = None
    deepstack_layers: tuple[int, ...] = ()
    window_size: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    tokens_per_second: float | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class ModelConfig:
    """A whole checkpoint's configuration; ``raw`` is config.json as it was read."""

    family: str
    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tie_word_embeddings: bool
    dtype: str | None
    raw: dict[str, Any] = field(repr=False)

    @property
    def max_position(self) -> int:
        return self.text.max_position

    @property
    def feature_rows(self) -> int:
        """1 + D: the merged token and its deepstack features."""
        return 1 + len(self.vision.deepstack_layers)


@dataclass(frozen=True)
class Normalization:
    """What the checkpoint's processor does to a picture: ``(x / 255 - mean) / std`` per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_config(folder: Path) -> ModelConfig:
    """Parse ``folder``/config.json; ModelLoadError names what is missing or not supported."""
    return parse_config(read_json(folder / "config.json"))


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """A ``ModelConfig`` from config.json in any published form (nested, flat, transformers 4 or 5)."""
    family = _family(raw)
    if raw.get("quantization_config"):
        raise ModelLoadError("quantised checkpoints are not supported (config.json has quantization_config)")
    flat = {k: v for k, v in raw.items() if k not in ("vision_config", "text_config")}
    text = _Fields(flat | (raw.get("text_config") or {}), "text_config")
    vision = _Fields(_Fields(raw, "config.json").get("vision_config", dict), "vision_config")
    whole = _Fields(raw, "config.json")
    config = ModelConfig(
        family=family,
        text=_text(family, text),
        vision=_VISION[family](vision),
        image_token_id=whole.get("image_token_id", int),
        video_token_id=whole.get("video_token_id", int),
        vision_start_token_id=whole.get("vision_start_token_id", int),
        vision_end_token_id=whole.get("vision_end_token_id", int, 151653),
        tie_word_embeddings=bool(
            raw.get("tie_word_embeddings") or text.get("tie_word_embeddings", bool, False)
        ),
        dtype=_dtype(text),
        raw=raw,
    )
    _check(config)
    return config


def read_normalization(folder: Path, family: str) -> Normalization:
    """Mean and standard deviation of the processor files in ``folder``; the family's own if there are none.

    ModelLoadError when pictures and clips are normalised differently or not from 0..255.
    """
    files = ("preprocessor_config.json", "video_preprocessor_config.json")
    parts = [read_json(folder / name) for name in files if (folder / name).is_file()]
    if (folder / "processor_config.json").is_file():
        whole = read_json(folder / "processor_config.json")
        parts += [whole[k] for k in ("image_processor", "video_processor") if k in whole]
    found = {_normalization(part) for part in parts if "image_mean" in part and "image_std" in part}
    if len(found) > 1:
        raise ModelLoadError(f"pictures and clips are normalised differently in {folder}: not supported")
    return found.pop() if found else Normalization(*(_HALF if family == "qwen3_vl" else _CLIP))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ModelLoadError when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


class _Fields:
    """Typed access to a part of config.json; what is missing or of a wrong type is named in the error."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, name: str, kind: type, default: Any = None, *, alias: str | None = None) -> Any:
        value = self.values.get(name)
        if value is None and alias is not None:
            value = self.values.get(alias)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.where} lacks {name!r}", param=name)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelLoadError(
                f"{self.where}: {name} must be of type {kind.__name__}, not {value!r}", param=name
            )
        return value

    def ints(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise ModelLoadError(
                f"{self.where}: {name} must be a list of integers, not {value!r}", param=name
            )
        return tuple(value)


def _family(raw: dict[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    for family, architecture in FAMILIES.items():
        if architecture in architectures or (not architectures and raw.get("model_type") == family):
            return family
    named = ", ".join(map(str, architectures)) or raw.get("model_type") or "none named"
    raise ModelLoadError(
        f"unsupported architecture: {named}; supported: {', '.join(FAMILIES.values())}", param="architectures"
    )


def _text(family: str, text: _Fields) -> TextConfig:
    qwen3 = family == "qwen3_vl"
    heads = text.get("num_attention_heads", int)
    hidden = text.get("hidden_size", int)
    theta, section, interleaved = _rope(text)
    bias = text.get("attention_bias", bool, False) if qwen3 else False
    _only(text, "hidden_act", "silu", "silu")
    if text.values.get("use_sliding_window"):
        raise ModelLoadError("sliding-window attention (use_sliding_window) is not supported")
    return TextConfig(
        hidden_size=hidden,
        intermediate_size=text.get("intermediate_size", int),
        num_layers=text.get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads", int, heads),
        head_dim=text.get("head_dim", int, 128 if qwen3 else hidden // heads),
        vocab_size=text.get("vocab_size", int),
        rms_norm_eps=text.get("rms_norm_eps", float, 1e-6 if qwen3 else 1e-5),
        rope_theta=theta,
        mrope_section=section,
        mrope_interleaved=interleaved or qwen3,
        qkv_bias=bias or not qwen3,
        output_bias=bias,
        qk_norm=qwen3,
        max_position=text.get("max_position_embeddings", int),
    )


def _rope(text: _Fields) -> tuple[float, tuple[int, int, int], bool]:
    """(theta, M-RoPE section, interleaved) from ``rope_parameters`` (transformers 5) or ``rope_scaling``."""
    rope = text.values.get("rope_parameters") or text.values.get("rope_scaling")
    if not isinstance(rope, dict):
        raise ModelLoadError(
            f"{text.where} lacks 'rope_scaling' (or 'rope_parameters')", param="rope_scaling"
        )
    fields = _Fields({"rope_theta": text.values.get("rope_theta")} | rope, "rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ModelLoadError(
            f"rope type {kind!r} is not supported; supported: default, mrope", param="rope_type"
        )
    section = fields.ints("mrope_section")
    if len(section) != 3:
        raise ModelLoadError(
            f"mrope_section must have three numbers, not {list(section)}", param="mrope_section"
        )
    return fields.get("rope_theta", float), section, bool(rope.get("mrope_interleaved", False))


def _vision_rope_theta(vision: _Fields) -> float:
    rope = vision.values.get("rope_parameters") or {}
    return float(rope.get("rope_theta", 10000.0))


def _common_vision(vision: _Fields, patch_size: int) -> dict[str, Any]:
    _only(vision, "temporal_patch_size", 2, 2)
    return {
        "depth": vision.get("depth", int),
        "num_heads": vision.get("num_heads", int),
        "patch_size": vision.get("patch_size", int, patch_size),
        "merge_size": vision.get("spatial_merge_size", int, 2),
        "in_channels": vision.get("in_channels", int, 3, alias="in_chans"),
        "rope_theta": _vision_rope_theta(vision),
    }


def _qwen2_vision(vision: _Fields) -> VisionConfig:
    hidden = vision.get("embed_dim", int)
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=int(hidden * vision.get("mlp_ratio", float, 4)),
        out_hidden_size=vision.get("hidden_size", int),
        hidden_act=vision.get("hidden_act", str, "quick_gelu"),
        **_common_vision(vision, 14),
    )


def _qwen2_5_vision(vision: _Fields) -> VisionConfig:
    _only(vision, "hidden_act", "silu", "silu")
    return VisionConfig(
        hidden_size=vision.get("hidden_size", int),
        intermediate_size=vision.get("intermediate_size", int),
        out_hidden_size=vision.get("out_hidden_size", int),
        hidden_act="silu",
        window_size=vision.get("window_size", int, 112),
        full_attention_layers=vision.ints("fullatt_block_indexes"),
        tokens_per_second=vision.get("tokens_per_second", float, 4.0),
        **_common_vision(vision, 14),
    )


def _qwen3_vision(vision: _Fields) -> VisionConfig:
    return VisionConfig(
        hidden_size=vision.get("hidden_size", int),
        intermediate_size=vision.get("intermediate_size", int),
        out_hidden_size=vision.get("out_hidden_size", int),
        hidden_act=vision.get("hidden_act", str, "gelu_pytorch_tanh"),
        num_position_embeddings=vision.get("num_position_embeddings", int),
        deepstack_layers=vision.ints("deepstack_visual_indexes"),
        **_common_vision(vision, 16),
    )


_VISION = {"qwen2_vl": _qwen2_vision, "qwen2_5_vl": _qwen2_5_vision, "qwen3_vl": _qwen3_vision}


def _only(fields: _Fields, name: str, allowed: Any, default: Any) -> None:
    value = fields.values.get(name, default)
    if value != allowed:
        raise ModelLoadError(
            f"{fields.where}: {name} {value!r} is not supported, only {allowed!r}", param=name
        )


def _dtype(text: _Fields) -> str | None:
    value = text.values.get("dtype") or text.values.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")


def _normalization(part: dict[str, Any]) -> Normalization:
    factor = part.get("rescale_factor", 1 / 255)
    if abs(factor * 255 - 1) > 1e-6 or part.get("do_rescale") is False or part.get("do_normalize") is False:
        raise ModelLoadError(
            "the processor must rescale by 1/255 and normalise; other settings are not supported"
        )
    return Normalization(tuple(map(float, part["image_mean"])), tuple(map(float, part["image_std"])))


def _check(config: ModelConfig) -> None:
    text, vision = config.text, config.vision
    rotary = sum(text.mrope_section)
    checks = {
        "num_key_value_heads": text.num_heads % text.num_kv_heads == 0,
        "mrope_section": rotary == text.head_dim // 2
        or (text.mrope_interleaved and rotary <= text.head_dim // 2),
        "out_hidden_size": vision.out_hidden_size == text.hidden_size,
        "num_heads": vision.hidden_size % vision.num_heads == 0 and vision.head_dim % 4 == 0,
        "deepstack_visual_indexes": len(vision.deepstack_layers) < text.num_layers
        and all(0 <= i < vision.depth for i in vision.deepstack_layers),
        "window_size": vision.window_size is None
        or vision.window_size % (vision.merge_size * vision.patch_size) == 0,
    }
    for name, fine in checks.items():
        if not fine:
            raise ModelLoadError(f"config.json: {name} does not fit the other sizes", param=name)
