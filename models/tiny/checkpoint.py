"""The bundled model as a transformers folder: its shape, its processors' settings, and writing it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from mmserve.models.tiny import tokenizer as tok

FOLDER = Path(__file__).parent / "checkpoint"
PATCH, MERGE = 16, 2

VISION = {
    "model_type": "qwen3_vl",
    "depth": 5,
    "hidden_size": 160,
    "intermediate_size": 640,
    "num_heads": 5,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 192,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [1, 3],
    "initializer_range": 0.02,
}

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type in ('video', 'video_url') or 'video' in part or 'video_url' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def config(tokenizer: Tokenizer) -> dict:
    """config.json: some 5.9 million parameters, every feature of Qwen3-VL in small."""
    ident = tokenizer.token_to_id
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ident("<|endoftext|>"),
        "eos_token_id": ident("<|im_end|>"),
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            "mrope_section": [12, 10, 10],
        },
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "image_token_id": ident("<|image_pad|>"),
        "video_token_id": ident("<|video_pad|>"),
        "vision_start_token_id": ident("<|vision_start|>"),
        "vision_end_token_id": ident("<|vision_end|>"),
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": dict(VISION),
    }


def processors() -> dict[str, dict]:
    """The image and video processors' files: pictures up to 192 x 192 pixels, clips of eight 128 x 128."""
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    image = {"shortest_edge": 96 * 96, "longest_edge": 192 * 192}
    video = {"shortest_edge": 4096, "longest_edge": 8 * 128 * 128}
    return {
        "preprocessor_config.json": {
            "size": image,
            **common,
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        "video_preprocessor_config.json": {
            "size": video,
            **common,
            "fps": 2,
            "min_frames": 4,
            "max_frames": 16,
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    }


def write(folder: Path, state: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write the whole folder, with weights in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    ident = tokenizer.token_to_id
    files = {
        "config.json": config(tokenizer),
        "generation_config.json": {
            "bos_token_id": ident("<|endoftext|>"),
            "pad_token_id": ident("<|endoftext|>"),
            "eos_token_id": [ident("<|im_end|>"), ident("<|endoftext|>")],
            "do_sample": False,
        },
        **processors(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tok.save(tokenizer, folder, CHAT_TEMPLATE)
    weights = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in state.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
