#!/usr/bin/env python3
"""Make the golden values of the video processors and of the combined processors, once.

    python tests/parity/make_video_golden.py

Needs torch, torchvision, transformers and av, in an environment of its own: mmserve itself has no
torchvision. Writes ``golden/video.npz`` (resized frames) and ``golden/prompts.json`` (frame choices, grids
and expanded token ids) beside this file. Made with torch 2.14.1, torchvision 0.29.1, transformers 5.24.0.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from helpers import golden_cases as cases
from helpers.tiny_folder import TEMPLATE, write_folder

HERE = pathlib.Path(__file__).parent / "golden"


def processor(family):
    """A video processor with the budgets of ``cases.BUDGETS``."""
    kind = Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    low, high = cases.BUDGETS[family]
    size = {"shortest_edge": low, "longest_edge": high}
    return kind(size=size, cap_pixels_per_frame=False, do_sample_frames=False, fps=2)


def resized(family, frames):
    """uint8 [F, H, W, 3] as the video processor sees its frames after the resize."""
    video = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    kind = processor(family)
    out = kind(videos=[video], return_tensors="pt", do_rescale=False, do_normalize=False)
    t, h, w = out["video_grid_thw"][0].tolist()
    p, m = kind.patch_size, kind.merge_size
    patches = out["pixel_values_videos"].reshape(t, h // m, w // m, m, m, 3, 2, p, p)
    pixels = patches.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * 2, h * p, w * p, 3)
    assert torch.equal(pixels, pixels.round())
    return pixels.to(torch.uint8).numpy()


def picked(family, total, rate, fps, num_frames):
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    asked = {"fps": fps} if fps else {"num_frames": num_frames} if num_frames else {"fps": 2}
    return [int(i) for i in processor(family).sample_frames(metadata=metadata, **asked)]


def prompts(folder, family):
    """Expanded ids of the chats of ``cases.CHATS``."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    low, high = cases.BUDGETS[family]
    patch = 16 if family == "qwen3_vl" else 14
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": low, "longest_edge": high}, patch_size=patch)
    kind = Qwen3VLProcessor if family == "qwen3_vl" else Qwen2_5_VLProcessor
    both = kind(images, tokenizer, processor(family), chat_template=TEMPLATE)
    found = {}
    for name, chat in cases.CHATS.items():
        text = both.apply_chat_template(cases.plain(chat), tokenize=False, add_generation_prompt=True)
        pictures = [cases.picture(*p[1:]) for m in chat for p in m[1] if p[0] == "image"]
        videos = [cases.moving(*p[1:]) for m in chat for p in m[1] if p[0] == "video"]
        metadata = [
            VideoMetadata(total_num_frames=len(v), fps=2.0, frames_indices=list(range(len(v))))
            for v in videos
        ]
        given = {"images": pictures or None, "videos": videos or None}
        if videos:
            given["videos_kwargs"] = {"video_metadata": metadata, "do_sample_frames": False}
        out = both(text=[text], **given)
        found[name] = [int(i) for i in out["input_ids"][0]]
        if "second_per_grid_ts" in out:
            found[name + " seconds"] = [float(s) for s in out["second_per_grid_ts"]]
    return found


def main():
    HERE.mkdir(exist_ok=True)
    folder = HERE / "work"
    write_folder(folder)
    arrays, notes = {}, {"frames": {}, "prompts": {}}
    for family in cases.RESIZED:
        for name, shape in cases.SHAPES.items():
            arrays[f"{family}/{name}"] = resized(family, cases.moving(*shape))
        notes["frames"][family] = [[*case, picked(family, *case)] for case in cases.sampling_cases(family)]
    for family in ("qwen2_5_vl", "qwen3_vl"):
        notes["prompts"][family] = prompts(folder, family)
    np.savez_compressed(HERE / "video.npz", **arrays)
    shutil.rmtree(folder)
    (HERE / "prompts.json").write_text(json.dumps(notes) + "\n")


if __name__ == "__main__":
    main()
