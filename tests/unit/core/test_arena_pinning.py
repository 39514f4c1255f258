"""The part of the arena that a GPU may read from by itself."""

import numpy as np
import pytest
import torch

from mmserve.core import arena as arenas
from mmserve.core.arena import WARM, Arena
from mmserve.engine.runner.devices import crosses_end


@pytest.mark.parametrize("nbytes", [1 << 20, WARM + (8 << 20)])
def test_what_is_pinned_is_never_given_back_to_the_kernel(nbytes, monkeypatch):
    """A page that was given back is another one when it is touched again."""
    arena = Arena(nbytes)
    address, warm = arena.window.warm
    assert (address, warm) == (arena.window.address, min(nbytes, WARM))
    punched = []

    class Watched:
        def __init__(self, memory):
            self.memory = memory

        def madvise(self, option, start, length):
            punched.append((start, start + length))

    monkeypatch.setattr(arena.window, "_map", Watched(arena.window._map))
    size = 4 << 20
    blocks = [arena.allocate(size) for _ in range(arena.total // size)]
    for block in blocks:
        arena.release(block)
    assert all(start >= warm for start, _ in punched)
    assert bool(punched) == (nbytes > WARM and hasattr(arenas.mmap, "MADV_REMOVE"))


def test_memory_that_is_pinned_in_part_is_told_apart():
    tensor = torch.from_numpy(np.zeros(100, np.uint8))
    first = tensor.data_ptr()
    assert not crosses_end(range(0), tensor)
    assert not crosses_end(range(first, first + 100), tensor)
    assert not crosses_end(range(first - 50, first), tensor)
    assert crosses_end(range(first - 50, first + 99), tensor)
    assert not crosses_end(range(first - 50, first + 99), tensor[:99])
    assert crosses_end(range(first, first + 60), tensor[59:])
