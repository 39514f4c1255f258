"""A model folder without weights: a small byte-level BPE tokenizer with Qwen's reserved tokens."""

import json
import pathlib

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|fim_pad|>"]
WORDS = (
    " the and a what is in this picture image video clip describe colour red blue green seconds system user "
    "assistant You are helpful assistant. Hello world answer Look at two pictures here which one larger not "
    "vision start end pad im <| |> 12 34 == -> :: !! ... čaj žlutý 日本 é"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """
{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
FAMILIES = {
    "qwen2_vl": (14, [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    "qwen2_5_vl": (14, [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    "qwen3_vl": (16, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
}


def _alphabet():
    """The printable character of every byte, as byte-level BPE tokenizers write them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def tokenizer_json():
    """The tokenizer file; words are built by merging from the left, so it never varies."""
    letters = _alphabet()
    vocab = {c: i for i, c in enumerate(sorted(letters))}
    merges = []
    for word in WORDS.split():
        for form in (word, " " + word):
            pieces = [letters[b] for b in form.encode()]
            while len(pieces) > 1:
                if pieces[0] + pieces[1] not in vocab:
                    vocab[pieces[0] + pieces[1]] = len(vocab)
                    merges.append([pieces[0], pieces[1]])
                pieces[:2] = [pieces[0] + pieces[1]]
    added = [
        {
            "id": len(vocab) + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIALS,
        }
        for i, token in enumerate(SPECIALS + PLAIN)
    ]
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def token_ids():
    return {t["content"]: t["id"] for t in tokenizer_json()["added_tokens"]}


def write_folder(
    folder, family="qwen3_vl", *, template=TEMPLATE, image=None, video=None, budget=None, clip=None
):
    """Write the folder. ``image``/``video`` replace fields of the preprocessor files; ``budget``/``clip`` are
    (fewest, most) pixels."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = token_ids()
    patch, mean, std = FAMILIES[family]
    sizes = {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": std,
    }
    vision = {"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_5_vl":
        vision["tokens_per_second"] = 2
    config = {
        "model_type": family,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": vision,
    }
    low, high = budget or (patch * patch * 4, 1 << 20)
    short, long = clip or (patch * patch * 4, 1 << 20)
    files = {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}},
        "config.json": config,
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "top_k": 20},
        "preprocessor_config.json": {
            "size": {"shortest_edge": low, "longest_edge": high},
            **sizes,
            **(image or {}),
        },
        "video_preprocessor_config.json": {
            "size": {"shortest_edge": short, "longest_edge": long},
            **sizes,
            **(video or {}),
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
