"""M-RoPE positions against transformers' get_rope_index: exactly equal, on random layouts."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tiny_folder import token_ids, write_folder
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from mmserve.preprocess.layout import lay_out
from mmserve.preprocess.media import Medium
from mmserve.preprocess.positions import mrope
from mmserve.preprocess.spec import ProcessorSpec

MODELS = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}


def medium_of(rng, kind):
    count = 1 if kind == "image" else rng.randint(1, 6)
    grid = (2 * rng.randint(1, 8), 2 * rng.randint(1, 8))
    times = tuple(i * 0.5 for i in range(count)) if kind == "video" else ()
    pixels = tuple(np.zeros(0, np.uint8) for _ in range(count))
    digests = tuple(bytes(32) for _ in range(count))
    return Medium(kind, grid, pixels, digests, None, times, rng.choice([0.2, 0.5, 1.0, 4 / 3, 2.0, 0.7]))


def prompt_of(rng, kinds, ids):
    tokens = [rng.randint(1, 90) for _ in range(rng.randint(0, 5))]
    for kind in kinds:
        pad = ids["<|image_pad|>"] if kind == "image" else ids["<|video_pad|>"]
        tokens += [ids["<|vision_start|>"], pad, ids["<|vision_end|>"]]
        tokens += [rng.randint(1, 90) for _ in range(rng.randint(0, 5))]
    return tokens or [1]


def theirs(spec, layout, media):
    ids = torch.tensor(layout.token_ids[None].astype(np.int64))
    types = (ids == spec.tokens.image) * 1 + (ids == spec.tokens.video) * 2
    grids = {k: [[len(m.pixels), *m.grid] for m in media if m.kind == k] or None for k in ("image", "video")}
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=int(spec.tokens_per_second))
    kind = MODELS[spec.family]
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: kind.get_vision_position_ids(model, *a, **k)
    given = {f"{k}_grid_thw": torch.tensor(v) if v else None for k, v in grids.items()}
    if spec.family == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([m.seconds_per_grid for m in media if m.kind == "video"])
    positions, delta = kind.get_rope_index(model, ids, types.int(), **given)
    return positions[:, 0].numpy(), int(delta[0, 0])


def outlasts_its_picture(spec, medium):
    """A clip longer in time than in space: transformers 5.24 then resumes text elsewhere (see mrope)."""
    if medium.kind == "image" or spec.family == "qwen3_vl":
        return False
    step = np.float32(spec.tokens_per_second * medium.seconds_per_grid if spec.family == "qwen2_5_vl" else 1)
    return int((len(medium.pixels) - 1) * step) + 1 > max(medium.grid) // 2


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("what", ["text", "images", "videos", "mixed"])
def test_positions_equal_get_rope_index(tmp_path, family, what):
    spec = ProcessorSpec.load(write_folder(tmp_path, family))
    rng = random.Random(f"{family} {what}")
    choice = {"text": [], "images": ["image"], "videos": ["video"], "mixed": ["image", "video"]}[what]
    compared = 0
    while compared < 60:
        kinds = [rng.choice(choice) for _ in range(rng.randint(1, 4))] if choice else []
        media = [medium_of(rng, k) for k in kinds]
        if any(outlasts_its_picture(spec, m) for m in media):
            continue
        layout = lay_out(
            prompt_of(rng, kinds, token_ids()), media, spec, lambda text: [5] * (len(text) % 4 + 1)
        )
        positions, delta = mrope(len(layout.token_ids), layout.blocks)
        expected, expected_delta = theirs(spec, layout, media)
        assert (positions == expected).all()
        assert delta == expected_delta
        compared += 1


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_text_resumes_after_the_largest_position_of_a_long_clip(tmp_path, family):
    spec = ProcessorSpec.load(write_folder(tmp_path, family))
    clip = Medium("video", (4, 4), (np.zeros(0),) * 9, (bytes(32),) * 9, None, (0.0,) * 9, 1.0)
    layout = lay_out([1, spec.tokens.video, 1], [clip], spec, lambda text: [])
    positions, delta = mrope(len(layout.token_ids), layout.blocks)
    assert positions[:, -1].tolist() == [int(positions[:, :-1].max()) + 1] * 3
    expected, _ = theirs(spec, layout, [clip])
    assert (positions[:, :-1] == expected[:, :-1]).all()
    assert delta == positions.max() + 1 - len(layout.token_ids)
