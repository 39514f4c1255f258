"""What a model folder says about preprocessing, read once and checked."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from mmserve.core.errors import ModelLoadError

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
}
PATCH_SIZE = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
TOKENS_PER_SECOND = 4.0  # of a Qwen2.5-VL configuration that does not say
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
VISION_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


@dataclass(frozen=True)
class PixelBudget:
    """Fewest and most pixels after the resize: of an image, of a frame, or (Qwen3-VL) of a whole clip."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True)
class FrameRule:
    """How a clip is sampled and sized when the request does not say."""

    fps: float
    num_frames: int | None
    min_frames: int
    max_frames: int
    cap: bool
    max_tokens: int


@dataclass(frozen=True)
class VisionTokens:
    """Token ids of the placeholders and of the marks around them."""

    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True)
class ProcessorSpec:
    """All that turning words, pictures and clips into a prompt needs to know about a model.

    ``patch`` and ``merge``: side of a patch in pixels, of a merged token in patches. ``video`` bounds
    one frame (Qwen2-VL, Qwen2.5-VL) or the whole clip (Qwen3-VL). ``tokens_per_second`` scales the time
    axis of Qwen2.5-VL's positions. ``special_tokens`` are the named strings a chat template may use.
    ``sampling`` holds the model's own defaults, by the field names of ``SamplingParams``.
    """

    folder: Path
    family: Family
    patch: int
    merge: int
    temporal_patch: int
    image: PixelBudget
    video: PixelBudget
    frames: FrameRule
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens: VisionTokens
    tokens_per_second: float
    eos_ids: tuple[int, ...]
    sampling: Mapping[str, float]
    special_tokens: Mapping[str, str]
    chat_template: str | None = field(repr=False)
    tokenizer_json: str = field(repr=False)

    @property
    def factor(self) -> int:
        """Side of a merged token in pixels; sizes after the resize are multiples of it."""
        return self.patch * self.merge

    @classmethod
    def load(cls, folder: str | Path) -> "ProcessorSpec":
        """Read a Hugging Face model folder. ModelLoadError names the file or field that is wrong."""
        root = Path(folder)
        config = _read(root, "config.json", required=True)
        family = _family(config, root)
        image, video = _processor_configs(root)
        vision = config.get("vision_config") or {}
        patch = _agreed(image, "patch_size", vision, "patch_size", PATCH_SIZE[family])
        merge = _agreed(image, "merge_size", vision, "spatial_merge_size", 2)
        tokenizer_json = _text(root, "tokenizer.json")
        tokenizer_config = _read(root, "tokenizer_config.json")
        ids = cache(partial(_added_ids, tokenizer_json, root))  # a large file; most folders need no look
        special_tokens = _special_tokens(tokenizer_config)
        generation = _read(root, "generation_config.json")
        return cls(
            folder=root,
            family=family,
            patch=patch,
            merge=merge,
            temporal_patch=_agreed(image, "temporal_patch_size", vision, "temporal_patch_size", 2),
            image=_budget(image, PixelBudget(56 * 56, 28 * 28 * 1280)),
            video=_budget(video, _default_video(family)),
            frames=_frame_rule(video, family),
            mean=_floats(image, "image_mean"),
            std=_floats(image, "image_std"),
            tokens=_vision_tokens(config, ids),
            tokens_per_second=float(vision.get("tokens_per_second", TOKENS_PER_SECOND)),
            eos_ids=_eos_ids(generation, config, special_tokens, ids),
            sampling=MappingProxyType(_sampling(generation)),
            special_tokens=MappingProxyType(special_tokens),
            chat_template=_chat_template(root, tokenizer_config),
            tokenizer_json=tokenizer_json,
        )


def _text(root: Path, name: str) -> str:
    try:
        return (root / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{root} has no {name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{root / name} cannot be read: {error}") from None


def _read(root: Path, name: str, *, required: bool = False) -> dict[str, Any]:
    if not required and not (root / name).is_file():
        return {}
    try:
        value = json.loads(_text(root, name))
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{root / name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{root / name} must hold a JSON object")
    return cast(dict[str, Any], value)


def _family(config: dict[str, Any], root: Path) -> Family:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelLoadError(f"{root}: model_type {kind!r} is not supported; supported: {known}")
    return FAMILIES[str(kind)]


def _processor_configs(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The image and the video processor's settings, in the order transformers looks for them."""
    nested = _read(root, "processor_config.json")
    flat = _read(root, "preprocessor_config.json")
    image = nested.get("image_processor") or flat
    if not image:
        raise ModelLoadError(
            f"{root} has neither preprocessor_config.json nor an image_processor in processor_config.json"
        )
    video = nested.get("video_processor") or _read(root, "video_preprocessor_config.json") or flat or image
    return image, video


def _agreed(image: dict[str, Any], name: str, vision: dict[str, Any], other: str, default: int) -> int:
    """A setting that two files carry; they must not contradict each other."""
    ours, theirs = image.get(name), vision.get(other)
    if ours is not None and theirs is not None and int(ours) != int(theirs):
        raise ModelLoadError(
            f"{name} is {ours} in the image processor's configuration but vision_config.{other} is {theirs}"
        )
    value = ours if ours is not None else theirs
    return int(value) if value is not None else default


def _default_video(family: Family) -> PixelBudget:
    if family == "qwen3_vl":
        return PixelBudget(128 * 32 * 32, 768 * 32 * 32)
    return PixelBudget(128 * 28 * 28, 768 * 28 * 28)


def _budget(config: dict[str, Any], default: PixelBudget) -> PixelBudget:
    """``min_pixels``/``max_pixels`` win over ``size: {shortest_edge, longest_edge}``."""
    size = config.get("size") or {}
    low = config.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge")
    high = config.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge")
    return PixelBudget(int(low or default.min_pixels), int(high or default.max_pixels))


def _frame_rule(config: dict[str, Any], family: Family) -> FrameRule:
    qwen3 = family == "qwen3_vl"
    cap = config.get("cap_pixels_per_frame")
    return FrameRule(
        fps=float(config.get("fps") or 2.0),
        num_frames=config.get("num_frames"),
        min_frames=int(config.get("min_frames") or 4),
        max_frames=int(config.get("max_frames") or 768),
        cap=not qwen3 if cap is None else bool(cap),
        max_tokens=int(config.get("max_video_tokens") or (768 if qwen3 else 128_000)),
    )


def _floats(config: dict[str, Any], name: str) -> tuple[float, ...]:
    value = config.get(name)
    if not isinstance(value, list) or len(value) != 3:
        raise ModelLoadError(f"the image processor's configuration needs {name}, a list of three numbers")
    return tuple(float(v) for v in value)


def _added_ids(tokenizer_json: str, root: Path) -> dict[str, int]:
    try:
        added = json.loads(tokenizer_json).get("added_tokens") or []
        return {str(t["content"]): int(t["id"]) for t in added}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{root / 'tokenizer.json'} is not a tokenizer file: {error}") from None


def _vision_tokens(config: dict[str, Any], ids: Callable[[], dict[str, int]]) -> VisionTokens:
    found = {}
    for name, content in VISION_TOKENS.items():
        value = config.get(f"{name}_token_id")
        value = ids().get(content) if value is None else value
        if value is None:
            raise ModelLoadError(f"config.json has no {name}_token_id and tokenizer.json no {content}")
        found[name] = int(value)
    return VisionTokens(**found)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
    return found


def _eos_ids(
    generation: dict[str, Any],
    config: dict[str, Any],
    special: dict[str, str],
    ids: Callable[[], dict[str, int]],
) -> tuple[int, ...]:
    """The generation configuration decides; without one, the model's and the tokenizer's own end tokens."""
    found = _ids(generation.get("eos_token_id"))
    if not found:
        found = _ids(config.get("eos_token_id")) or _ids(
            (config.get("text_config") or {}).get("eos_token_id")
        )
        found += _ids(ids().get(special.get("eos_token", "")))
    if not found:
        raise ModelLoadError("no end token: generation_config.json and config.json have no eos_token_id")
    return tuple(dict.fromkeys(found))


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _sampling(generation: dict[str, Any]) -> dict[str, float]:
    found = {k: generation[k] for k in SAMPLING_FIELDS if generation.get(k) is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _chat_template(root: Path, tokenizer_config: dict[str, Any]) -> str | None:
    if (root / "chat_template.jinja").is_file():
        return _text(root, "chat_template.jinja")
    for source in (_read(root, "chat_template.json"), _read(root, "processor_config.json"), tokenizer_config):
        template = source.get("chat_template")
        if isinstance(template, list):
            template = {t["name"]: t["template"] for t in template}.get("default")
        if template:
            return str(template)
    return None
