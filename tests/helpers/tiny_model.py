"""A whole model folder: the tokenizer of ``tiny_folder`` and random Qwen3-VL weights that fit it."""

import json

import torch
import transformers
from helpers.qwen_pairs import QWEN3_TEXT, VISION3, _random
from helpers.tiny_folder import token_ids, tokenizer_json, write_folder


def write_model(folder, seed=0):
    """Write the folder (float32 weights, at most 1,024 positions); returns it."""
    write_folder(folder, "qwen3_vl", clip=(4096, 1 << 15))
    ids = token_ids()
    vocab = max(max(tokenizer_json()["model"]["vocab"].values()), *ids.values()) + 1
    names = {f"{n}_token_id": ids[f"<|{p}|>"] for n, p in NAMES.items()}
    text = {**QWEN3_TEXT, "vocab_size": vocab, "max_position_embeddings": 1024}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=VISION3, tie_word_embeddings=False, **names
    )
    torch.manual_seed(seed)
    model = transformers.Qwen3VLForConditionalGeneration(config)
    for name, value in model.named_parameters():
        value.data = _random(name, value)
    model.tie_weights()
    model.save_pretrained(folder)
    end = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "temperature": 0.7, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(end))
    return folder


NAMES = {
    "image": "image_pad",
    "video": "video_pad",
    "vision_start": "vision_start",
    "vision_end": "vision_end",
}
