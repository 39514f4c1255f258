"""A whole small Qwen3-VL folder without weights, for ``load_format="dummy"``."""

import json

from helpers.tiny_folder import tokenizer_json, write_folder

TEXT = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
    "attention_bias": False,
    "tie_word_embeddings": True,
}
VISION = {
    "model_type": "qwen3_vl",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


def write_dummy_model(folder):
    """Write the folder; its pictures have at most 256 tokens, its clips at most 64 a frame pair."""
    write_folder(folder, budget=(64 * 64, 512 * 512), clip=(64 * 64, 8 * 128 * 128))
    size = max(token["id"] for token in tokenizer_json()["added_tokens"]) + 1
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"text_config": {**TEXT, "vocab_size": size}, "tie_word_embeddings": True}
    config["vision_config"] |= VISION
    path.write_text(json.dumps(config))
    return folder
