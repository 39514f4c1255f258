"""Constants of a grid: merge-block order, windows, learned positions, the bounded cache."""

import pytest
import torch
import torch.nn.functional as F

from mmserve.encoders.grids import GridCache, GridConstants, bilinear, coordinates, windows

GRIDS = [(2, 2), (8, 8), (10, 14), (6, 22), (18, 4)]


@pytest.mark.parametrize("grid", GRIDS)
def test_patches_of_a_merged_token_are_neighbours(grid):
    places = coordinates(grid, 2).view(-1, 4, 2)
    assert (places // 2 == places[:, :1] // 2).all()
    assert len({tuple(p) for p in places.view(-1, 2).tolist()}) == grid[0] * grid[1]


@pytest.mark.parametrize("grid", GRIDS)
def test_windows_hold_each_token_once_and_only_neighbours(grid):
    order, lengths = windows(grid, 2, 4)
    assert sorted(order.tolist()) == list(range(grid[0] * grid[1] // 4))
    assert sum(lengths) == grid[0] * grid[1]
    width = grid[1] // 2
    for window in order.split([n // 4 for n in lengths]):
        rows, columns = window // width, window % width
        assert len(set((rows // 4).tolist())) == len(set((columns // 4).tolist())) == 1


@pytest.mark.parametrize("grid", [(2, 4), (6, 6), (10, 14)])
def test_learned_positions_equal_torch_interpolation(grid):
    table = torch.randn(25, 3)
    indices, weights = bilinear(grid, 2, 5)
    found = (table[indices] * weights[:, :, None]).sum(1)
    image = table.T.view(1, 3, 5, 5)
    wanted = F.interpolate(image, size=grid, mode="bilinear", align_corners=True)[0]
    row, column = coordinates(grid, 2).unbind(1)
    torch.testing.assert_close(found, wanted[:, row, column].T, rtol=0, atol=1e-5)


def test_cache_drops_the_least_recently_used_grid():
    built = []

    def build(grid):
        built.append(grid)
        return GridConstants(torch.empty(0), torch.empty(0))

    cache = GridCache(build, max_rows=100)
    for grid in [(8, 8), (4, 4), (8, 8), (6, 6), (8, 8), (4, 4)]:
        cache(grid)
    assert built == [(8, 8), (4, 4), (6, 6), (4, 4)]
    assert cache.rows <= 100
    cache((20, 20))  # larger than the whole cache: built, not kept
    assert cache.rows == 0
