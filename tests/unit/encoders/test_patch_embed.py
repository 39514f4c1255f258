"""The folded patch embedding against the checkpoint's own form: normalise, then convolve two frames."""

import pytest
import torch
import torch.nn.functional as F

from mmserve.encoders.patch_embed import PatchEmbed, patch_rows
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.ops.registry import choose_ops

PATCH, MERGE, WIDTH = 6, 2, 20
CONFIG = VisionConfig(
    hidden_size=WIDTH,
    intermediate_size=8,
    out_hidden_size=8,
    depth=1,
    num_heads=2,
    hidden_act="gelu",
    patch_size=PATCH,
    merge_size=MERGE,
    in_channels=3,
    rope_theta=1e4,
)
NORMALIZATION = Normalization((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


def layer(dtype, bias=True):
    torch.manual_seed(0)
    place = Placement(torch.device("cpu"), dtype, choose_ops(torch.device("cpu"), dtype))
    embed = PatchEmbed(CONFIG, NORMALIZATION, place, bias=bias)
    values = {name: torch.randn(view.shape) * 0.1 for name, view in embed.slots("e")}
    for name, view in embed.slots("e"):
        view.copy_(values[name])
    embed.prepare()
    return embed, values


def plain(values, pixels, grid):
    """Convolution over normalised frames, a still standing twice, in merge-block order."""
    mean, std = torch.tensor(NORMALIZATION.mean), torch.tensor(NORMALIZATION.std)
    frames = (pixels.double() / 255 - mean) / std
    frames = frames.expand(2, *frames.shape[1:]) if len(frames) == 1 else frames
    bias = values.get("e.proj.bias")
    out = F.conv3d(
        frames.permute(3, 0, 1, 2)[None],
        values["e.proj.weight"].double(),
        None if bias is None else bias.double(),
        stride=(2, PATCH, PATCH),
    )[0, :, 0]
    h, w = grid
    blocks = out.view(WIDTH, h // MERGE, MERGE, w // MERGE, MERGE).permute(1, 3, 2, 4, 0)
    return blocks.reshape(h * w, WIDTH)


def item(frames, grid, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (frames, grid[0] * PATCH, grid[1] * PATCH, 3)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_folded_equals_plain_form(frames, bias, dtype, tolerance):
    embed, values = layer(dtype, bias)
    pixels = item(frames, (4, 8))
    found = embed([pixels], [(4, 8)])
    torch.testing.assert_close(found.double(), plain(values, pixels, (4, 8)), rtol=0, atol=tolerance)


def test_still_equals_the_same_frame_twice():
    embed, _ = layer(torch.float32)
    still = item(1, (4, 4))
    twice = still.expand(2, -1, -1, -1).contiguous()
    torch.testing.assert_close(embed([still], [(4, 4)]), embed([twice], [(4, 4)]), rtol=0, atol=2e-5)


def test_still_takes_half_the_arithmetic():
    rows = [patch_rows(item(f, (2, 2)), (2, 2), PATCH, MERGE) for f in (1, 2)]
    assert rows[0].shape[1] * 2 == rows[1].shape[1]
    embed, _ = layer(torch.float32)
    assert embed.packed[1].shape[1] * 2 == embed.packed[2].shape[1]


def test_mixed_batch_keeps_the_order_of_items():
    embed, values = layer(torch.float32)
    grids = [(2, 4), (4, 2), (2, 2), (6, 2)]
    pixels = [item(f, g, seed) for seed, (f, g) in enumerate(zip([2, 1, 2, 1], grids, strict=True))]
    wanted = torch.cat([plain(values, p, g) for p, g in zip(pixels, grids, strict=True)])
    torch.testing.assert_close(embed(pixels, grids).double(), wanted, rtol=0, atol=2e-5)


def test_pixels_that_do_not_fit_the_grid_are_refused():
    embed, _ = layer(torch.float32)
    with pytest.raises(ValueError, match="do not fit a grid of 4x4"):
        embed([item(1, (4, 2))], [(4, 4)])
    with pytest.raises(ValueError, match="1 or 2 frames, not 3"):
        embed([item(3, (2, 2))], [(2, 2)])
