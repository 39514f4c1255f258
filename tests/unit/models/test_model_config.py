"""config.json in the forms that are published, and the errors for those that are not supported."""

import copy
import json
import subprocess
import sys

import pytest

from mmserve.core.errors import ModelLoadError
from mmserve.models.config import parse_config, read_config, read_normalization

IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
TEXT = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "vocab_size": 151936,
}
FLAT_QWEN2 = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    **TEXT,
    **IDS,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": 32768,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}
FLAT_QWEN25 = {
    **FLAT_QWEN2,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3 = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    **IDS,
    "tie_word_embeddings": True,
    "text_config": {
        **TEXT,
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 1536,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def changed(raw, **values):
    """A copy with ``section__field`` or ``field`` set; None removes it."""
    raw = copy.deepcopy(raw)
    for path, value in values.items():
        *sections, field = path.split("__")
        place = raw
        for section in sections:
            place = place[section]
        place[field] = value
        if value is None:
            del place[field]
    return raw


def test_flat_qwen2_vl():
    config = parse_config(FLAT_QWEN2)
    assert config.family == "qwen2_vl"
    assert config.text.qkv_bias
    assert not config.text.qk_norm
    assert config.text.head_dim == 128
    assert config.text.mrope_section == (16, 24, 24)
    assert not config.text.mrope_interleaved
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    assert (config.vision.hidden_size, config.vision.intermediate_size) == (1280, 5120)
    assert config.vision.hidden_act == "quick_gelu"
    assert config.feature_rows == 1


def test_flat_qwen2_5_vl():
    config = parse_config(FLAT_QWEN25)
    assert config.vision.full_attention_layers == (7, 15, 23, 31)
    assert config.vision.window_size == 112
    assert config.vision.tokens_per_second == 2
    assert not config.tie_word_embeddings


def test_nested_qwen3_vl():
    config = parse_config(QWEN3)
    assert config.text.rope_theta == 5e6
    assert config.text.mrope_interleaved
    assert config.text.qk_norm
    assert config.vision.deepstack_layers == (5, 11, 17)
    assert config.feature_rows == 4
    assert config.dtype == "bfloat16"


def test_rope_parameters_of_transformers_5():
    rope = {
        "rope_theta": 7.0,
        "rope_type": "default",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    raw = changed(
        QWEN3, text_config__rope_scaling=None, text_config__rope_theta=None, text_config__rope_parameters=rope
    )
    assert parse_config(raw).text == parse_config(changed(QWEN3, text_config__rope_theta=7.0)).text


def test_tied_when_only_the_text_part_says_so():
    raw = changed(QWEN3, tie_word_embeddings=None, text_config__tie_word_embeddings=True)
    assert parse_config(raw).tie_word_embeddings


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (changed(QWEN3, text_config__hidden_size=None), "text_config lacks 'hidden_size'"),
        (changed(QWEN3, vision_config=None), "config.json lacks 'vision_config'"),
        (changed(QWEN3, vision_config__depth="24"), "depth must be of type int, not '24'"),
        (changed(QWEN3, image_token_id=None), "lacks 'image_token_id'"),
        (changed(QWEN3, text_config__rope_scaling=None), "lacks 'rope_scaling'"),
        (changed(QWEN3, text_config__rope_scaling__rope_type="yarn"), "'yarn' is not supported"),
        (changed(QWEN3, text_config__hidden_act="relu"), "hidden_act 'relu' is not supported, only 'silu'"),
        (changed(QWEN3, vision_config__temporal_patch_size=4), "temporal_patch_size 4 is not supported"),
        (changed(QWEN3, vision_config__out_hidden_size=64), "out_hidden_size does not fit"),
        (changed(QWEN3, text_config__num_key_value_heads=5), "num_key_value_heads does not fit"),
        (changed(FLAT_QWEN2, rope_scaling__mrope_section=[16, 24]), "three numbers"),
        (changed(FLAT_QWEN2, rope_scaling__mrope_section=[16, 24, 20]), "mrope_section does not fit"),
        (changed(FLAT_QWEN2, use_sliding_window=True), "sliding-window"),
        (changed(QWEN3, quantization_config={"quant_method": "fp8"}), "quantised"),
        (changed(QWEN3, architectures=["LlamaForCausalLM"]), "LlamaForCausalLM; supported: Qwen2VL"),
        ({}, "none named; supported"),
    ],
)
def test_error_names_the_field(raw, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_config(raw)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="must hold a JSON object"):
        read_config(tmp_path)


def test_normalization_of_the_processor_files(tmp_path):
    assert read_normalization(tmp_path, "qwen3_vl").mean == (0.5, 0.5, 0.5)
    assert read_normalization(tmp_path, "qwen2_vl").std[0] == pytest.approx(0.26862954)
    part = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 1 / 255}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(part))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": part}))
    assert read_normalization(tmp_path, "qwen3_vl").std == (0.4, 0.5, 0.6)
    other = {**part, "image_mean": [0.0, 0.0, 0.0]}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(other))
    with pytest.raises(ModelLoadError, match="normalised differently"):
        read_normalization(tmp_path, "qwen3_vl")


def test_config_and_hub_do_not_load_torch():
    code = "import mmserve.models.config, mmserve.models.hub, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
