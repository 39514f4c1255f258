"""The training forward equals transformers' Qwen3-VL on the same weights."""

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from mmserve.models.tiny import checkpoint, tokenizer  # noqa: E402
from mmserve.models.tiny.batches import Layout, collate, patchify  # noqa: E402
from mmserve.models.tiny.example import Example, Turn  # noqa: E402
from mmserve.models.tiny.net import TinyVL  # noqa: E402

TURNS = (Turn("what", "What is it?", "A red fish."), Turn("count", "How many?", "Two."))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.manual_seed(0)
    tok = tokenizer.build(["What is it? A red fish. How many? Two."] * 9, 400)
    net = TinyVL(checkpoint.config(tok)).eval()
    for parameter in net.parameters():  # bf16-exact, so that both sides hold the same numbers
        noise = 0.1 * torch.randn_like(parameter)
        parameter.data = (parameter.data + noise).bfloat16().float()
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint.write(folder, net.state_dict(), tok)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return tok, net, model.eval()


def reference_pixels(frames: np.ndarray) -> torch.Tensor:
    """Patches of one frame pair as the processors give them: [patches, 3*2*16*16], normalised."""
    two = np.concatenate([frames, frames]) if len(frames) == 1 else frames
    pixels = torch.from_numpy(two).float().div(127.5).sub(1).permute(0, 3, 1, 2)
    t, c, h, w = pixels.shape
    blocks = pixels.view(t // 2, 2, c, h // 32, 2, 16, w // 32, 2, 16)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, c * 2 * 16 * 16)


def compare(pair, frames: np.ndarray) -> float:
    tok, net, model = pair
    layout = Layout(tok)
    example = Example(frames, TURNS, "test")
    kind, grid = layout.media(example), (frames.shape[1] // 16, frames.shape[2] // 16)
    row = layout.row([(example, TURNS)])
    batch = collate([row], [patchify(frames)], grid)
    ids = batch.groups[0].ids
    with torch.no_grad():
        ours = net(batch.patches, batch.grid, batch.groups)
        thw = torch.tensor([[max(1, len(frames) // 2), *grid]])
        media = {
            "image": {"pixel_values": reference_pixels(frames), "image_grid_thw": thw},
            "video": {"pixel_values_videos": reference_pixels(frames), "video_grid_thw": thw},
        }[kind]
        types = torch.where(ids == tok.token_to_id("<|image_pad|>"), 1, 0)
        types[ids == tok.token_to_id("<|video_pad|>")] = 2
        theirs = model(input_ids=ids, mm_token_type_ids=types, **media).logits[0, batch.groups[0].wanted]
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("shape", [(96, 96), (128, 192), (256, 160)])
def test_picture_logits_equal_transformers(pair, shape):
    frames = np.random.default_rng(0).integers(0, 256, (1, *shape, 3), dtype=np.uint8)
    assert compare(pair, frames) < 1e-4


@pytest.mark.parametrize("count", [2, 8])
def test_clip_logits_equal_transformers(pair, count):
    frames = np.random.default_rng(1).integers(0, 256, (count, 96, 128, 3), dtype=np.uint8)
    assert compare(pair, frames) < 1e-4
