"""Model folders in the shapes of published checkpoints, without weights: for ``load_format dummy`` where no
network is. Tokenizer, template and processor are those of tiny-vl, so prompts are made of its tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

from mmserve.core.config import BUNDLED_MODEL
from mmserve.models.hub import SMALL_FILES, resolve

TINY = "tiny"  # tiny-vl's own shape, to try things out

_TEXT = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 5000000.0,
}
_ROPE = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
_VISION = {"num_heads": 16, "num_position_embeddings": 2304}
_PIXELS = {"shortest_edge": 65536, "longest_edge": 16777216}  # of a picture, as in Qwen3-VL's processor

# config.json of Qwen/Qwen3-VL-2B-Instruct and -8B-Instruct, as far as it tells sizes
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": {
        "tie_word_embeddings": True,
        "text_config": _TEXT
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "vision_config": _VISION
        | {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "qwen3-vl-8b": {
        "tie_word_embeddings": False,
        "text_config": _TEXT
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
        "vision_config": _VISION
        | {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    TINY: {},
}


def write_shape(name: str, folder: Path) -> Path:
    """Make ``folder`` a model folder of the shape ``name``; KeyError for one that is not in ``SHAPES``."""
    shape, source = SHAPES[name], resolve(BUNDLED_MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in SMALL_FILES:
        for path in source.glob(pattern):
            shutil.copy(path, folder)
    if shape:
        _change(folder / "config.json", _whole(shape))
        _change(folder / "preprocessor_config.json", {"size": _PIXELS})
    return folder


def _whole(shape: dict[str, Any]) -> dict[str, Any]:
    rope = _ROPE | {"rope_theta": _TEXT["rope_theta"]}
    return shape | {"text_config": shape["text_config"] | {"rope_scaling": _ROPE, "rope_parameters": rope}}


def _change(path: Path, changes: dict[str, Any]) -> None:
    """Objects one level below are merged, too."""
    values = json.loads(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
