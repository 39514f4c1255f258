"""Keys that are moved: as if they had been stored at the other position."""

import pytest
import torch
from helpers.qwen_pairs import Pair

from mmserve.engine.session.rotate import moved_back
from mmserve.models.layers.base import Placement
from mmserve.models.layers.rope import MRope
from mmserve.models.ops.reference import rope
from mmserve.models.ops.registry import reference_ops

PLACES = 40
PLACE = Placement(torch.device("cpu"), torch.float32, reference_ops())


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def config(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("model")).model.config.text


def positions(origin):
    """Different on the three axes, as in a picture."""
    steps = torch.arange(PLACES)
    return torch.stack((steps * 0, steps // 8, steps % 8)) + origin


def stored(keys, places, config, dtype=torch.float32):
    """As the model stores keys [T, heads, dim] at ``places``: rotated by its own tables, in its dtype."""
    return rope(keys.to(dtype), *MRope(config, PLACE)(places, dtype)).transpose(0, 1)


def exactly(keys, places, config):
    """The same in float64 throughout."""
    own = MRope(config, PLACE)
    angles = places.index_select(0, own.axes).T.double() * own.frequencies.double()
    turned = torch.complex(*keys.double().chunk(2, -1)) * torch.exp(1j * angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1).transpose(0, 1)


@pytest.fixture
def keys(config):
    torch.manual_seed(0)
    return torch.randn(PLACES, config.num_kv_heads, config.head_dim)


@pytest.mark.parametrize(("origin", "shift"), [(60, 60), (100, 37), (30, 0), (120, 119)])
def test_keys_moved_back_are_those_that_the_model_stores_there(config, keys, origin, shift):
    moved = moved_back(stored(keys, positions(origin), config), shift, config)
    assert moved.shape == (config.num_kv_heads, PLACES, config.head_dim)
    torch.testing.assert_close(moved, stored(keys, positions(origin - shift), config), rtol=0, atol=3e-5)


@pytest.mark.parametrize("origin", [1_000, 30_000, 250_000])
def test_far_positions_are_as_exact_as_near_ones(config, keys, origin):
    """Angles of 250,000 radians would be wrong by 1e-2 in float32."""
    moved = moved_back(exactly(keys, positions(origin), config).float(), origin - 5, config)
    exact = exactly(keys, positions(5), config).float()
    torch.testing.assert_close(moved, exact, rtol=0, atol=1e-5)


def test_in_bf16_a_move_costs_no_more_than_a_rounding(config, keys):
    moved = moved_back(stored(keys, positions(90), config, torch.bfloat16), 80, config)
    assert moved.dtype == torch.bfloat16
    exact = exactly(keys, positions(10), config)
    assert (moved.double() - exact).abs().max() < 0.05 * exact.abs().max()


def test_moving_twice_is_moving_by_both(config, keys):
    there = stored(keys, positions(90), config)
    twice = moved_back(moved_back(there, 30, config), 40, config)
    torch.testing.assert_close(twice, moved_back(there, 70, config), rtol=0, atol=1e-5)
