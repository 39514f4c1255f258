"""The patch embedding by a kernel that reads uint8 pixels where they lie, against patches cut by torch."""

from dataclasses import replace

import pytest
import torch

from mmserve.encoders.patch_embed import PatchEmbed
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Placement
from mmserve.models.ops.registry import reference_ops, triton_ops
from mmserve.models.ops.triton import runtime

DEVICE = torch.device("cpu" if runtime.INTERPRETED else "cuda")
if reason := runtime.unusable(DEVICE):
    pytest.skip(f"Triton cannot run: {reason}", allow_module_level=True)
EXACT = 2e-5 if runtime.INTERPRETED else 1e-4  # a GPU makes a product of float32 of three of TF32

CONFIG = VisionConfig(
    hidden_size=20,
    intermediate_size=8,
    out_hidden_size=8,
    depth=1,
    num_heads=2,
    hidden_act="gelu",
    patch_size=6,
    merge_size=2,
    in_channels=3,
    rope_theta=1e4,
)
NORMALIZATION = Normalization((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


def layers(dtype, patch=6, bias=True):
    """The same weights by the plain forms and by the kernel."""
    made = []
    for ops in (reference_ops(), triton_ops()):
        embed = PatchEmbed(
            replace(CONFIG, patch_size=patch), NORMALIZATION, Placement(DEVICE, dtype, ops), bias=bias
        )
        torch.manual_seed(0)
        for _, view in embed.slots("e"):
            view.copy_(torch.randn(view.shape) * 0.1)
        embed.prepare()
        made.append(embed)
    return made


def item(frames, grid, patch=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (frames, grid[0] * patch, grid[1] * patch, 3)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("patch", [6, 14, 16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, EXACT), (torch.bfloat16, 1e-2)])
def test_items_of_several_sizes_are_embedded_as_by_torch(frames, bias, dtype, tolerance, patch):
    """Sizes that fill no tile, and one item inside a larger picture."""
    plain, kernel = layers(dtype, patch, bias)
    grids = [(4, 6), (2, 2), (6, 18)]
    pixels = [item(frames, grid, patch, seed) for seed, grid in enumerate(grids)]
    framed = torch.zeros(frames, pixels[0].shape[1] + 3, pixels[0].shape[2], 3, dtype=torch.uint8)
    framed[:, 2:-1] = pixels[0]
    wanted = plain(pixels, grids)
    found = kernel([framed[:, 2:-1], *pixels[1:]], grids)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_stills_and_pairs_keep_their_order():
    plain, kernel = layers(torch.float32)
    grids = [(2, 4), (4, 2), (2, 2)]
    pixels = [item(f, g, seed=s) for s, (f, g) in enumerate(zip([2, 1, 2], grids, strict=True))]
    torch.testing.assert_close(kernel(pixels, grids), plain(pixels, grids), rtol=EXACT, atol=EXACT)


def test_pixels_that_do_not_fit_the_grid_are_refused():
    with pytest.raises(ValueError, match="do not fit a grid of 4x4"):
        layers(torch.float32)[1]([item(1, (4, 2))], [(4, 4)])
