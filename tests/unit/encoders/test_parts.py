"""Vision transformers in parts: wherever somebody pauses the features are the same, and no part is long."""

import pytest
import torch

from mmserve.encoders.attention import SCORE_BLOCK, SOFTMAX_WORK
from mmserve.encoders.parts import ROWS, Resumable
from mmserve.encoders.qwen2 import Qwen2Vision
from mmserve.encoders.qwen2_5 import Qwen25Vision
from mmserve.encoders.qwen3 import Qwen3Vision
from mmserve.models.config import Normalization, VisionConfig
from mmserve.models.layers.base import Layer, Placement
from mmserve.models.ops.registry import choose_ops

WIDTH, PATCH = 32, 14
SHARED = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "out_hidden_size": 24,
    "depth": 3,
    "num_heads": 2,
    "hidden_act": "silu",
    "patch_size": PATCH,
    "merge_size": 2,
    "in_channels": 3,
    "rope_theta": 1e4,
}
FAMILIES = {
    "qwen2_vl": (Qwen2Vision, {"hidden_act": "quick_gelu"}),
    "qwen2_5_vl": (Qwen25Vision, {"window_size": 112, "full_attention_layers": (1,)}),
    "qwen3_vl": (
        Qwen3Vision,
        {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 36, "deepstack_layers": (0, 1)},
    ),
}
GRIDS = [(24, 26), (2, 4), (24, 26), (6, 10), (20, 2)]  # two of them larger than a part


def encoder(family, dtype=torch.float32, **changes):
    kind, own = FAMILIES[family]
    config = VisionConfig(**{**SHARED, **own, **changes})
    place = Placement(torch.device("cpu"), dtype, choose_ops(torch.device("cpu"), dtype))
    made = kind(config, Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), place)
    torch.manual_seed(0)
    for layer in made.modules():
        if isinstance(layer, Layer):
            for name, view in layer.slots("it"):
                view.copy_(torch.randn(view.shape) * 0.1 + float(view.dim() == 1 and name.endswith("weight")))
            layer.prepare()
    return made


def pictures(grids=GRIDS, frames=1):
    generator = torch.Generator().manual_seed(0)
    sizes = [(frames, h * PATCH, w * PATCH, 3) for h, w in grids]
    return [torch.randint(0, 256, size, dtype=torch.uint8, generator=generator) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_any_size_give_the_same_features_bit_for_bit(family, dtype):
    model, pixels = encoder(family, dtype), pictures()
    pixels[1] = pixels[1].expand(2, -1, -1, -1)  # a clip's, among stills
    whole = model.forward(pixels, GRIDS)
    assert all(features.isfinite().all() and features.std() > 0 for features in whole)
    for work in (1.0, 3e6, 2e7):
        run, slices = Resumable(model.parts(pixels, GRIDS)), 0
        while not run.done:
            run.advance(work)
            slices += 1
        assert slices > 2
        assert all(torch.equal(a, b) for a, b in zip(run.result, whole, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_encoded_together_is_as_alone(family):
    model, pixels = encoder(family), pictures()
    together = model.forward(pixels, GRIDS)
    for i, grid in enumerate(GRIDS):
        torch.testing.assert_close(together[i], model.forward([pixels[i]], [grid])[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_work_of_all_parts_is_that_of_the_shapes(family):
    """Twice the multiplications of every matrix, and the scores of attention beside it."""
    grids = [(24, 26)]
    one, two = (sum(encoder(family, depth=d).parts(pictures(grids), grids)) for d in (3, 4))
    assert two - one > 2 * 24 * 26 * (4 * WIDTH**2 + 2 * WIDTH * 48)
    assert one > 3 * (two - one), "patch embedding and merger count too"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", [32, 64])
def test_a_part_is_so_many_rows_or_scores_whatever_the_picture(family, side):
    grids = [(side, side)]
    assert max(encoder(family).parts(pictures(grids), grids)) <= SCORE_BLOCK * (4 * WIDTH // 2 + SOFTMAX_WORK)


def test_a_run_stops_behind_the_part_that_comes_nearest_to_its_work():
    def parts():
        yield from (3.0, 3.0, 3.0)
        return "all"

    run = Resumable(parts())
    assert [run.advance(4.0), run.done] == [3.0, False]
    assert [run.advance(5.0), run.done] == [6.0, False]
    assert [run.advance(0.1), run.done] == [0.0, True]
    assert run.result == "all"
    assert run.advance(1.0) == 0.0


def test_an_error_in_the_middle_is_raised_where_it_happens():
    def parts():
        yield 1.0
        raise RuntimeError("out of luck")

    run = Resumable(parts())
    run.advance(1.0)
    with pytest.raises(RuntimeError, match="out of luck"):
        run.advance(1.0)


def test_parts_hold_whole_tokens():
    assert ROWS % 16 == 0
