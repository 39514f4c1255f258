"""The memory of keys and values, in slots that the page allocator hands out by the page."""

from dataclasses import dataclass

import torch

from mmserve.core.errors import ConfigError
from mmserve.engine.kv.pages import PageAllocator


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token takes: ``layers`` times a key and a value of [kv_heads, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Keys and values of all requests, [layers, 2, kv_heads, slots, head_dim].

    Slots stand inside heads, because on a CPU the keys of one head then lie together and a request
    whose pages follow one another is a plain strided matrix for a matmul. Whatever a slot holds before
    it is written is finite (zeros, or an earlier request's), so attention may read past a request's
    end and mask.
    """

    def __init__(self, shape: KVShape, total_pages: int, page_size: int, device: torch.device | str) -> None:
        self.shape = shape
        self.page_size = page_size
        self.allocator = PageAllocator(total_pages)
        size = (shape.layers, 2, shape.kv_heads, total_pages * page_size, shape.head_dim)
        self.data = torch.zeros(size, dtype=shape.dtype, device=device)

    @property
    def tokens(self) -> int:
        """Tokens that fit when every page but the dummy is in use."""
        return (self.allocator.total - 1) * self.page_size

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of ``layer``, [kv_heads, slots, head_dim], to read and to write."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Values of ``layer``, [kv_heads, slots, head_dim], to read and to write."""
        return self.data[layer, 1]


def pages_in(budget_mib: int, shape: KVShape, page_size: int) -> int:
    """Pages, the dummy included, that ``budget_mib`` MiB can hold; ConfigError when that is too few."""
    pages = budget_mib * 2**20 // (shape.token_bytes * page_size)
    if pages < 2:
        raise ConfigError(
            f"kv_cache_mib is {budget_mib}, but two pages of {page_size} tokens of this model take"
            f" {-(-2 * shape.token_bytes * page_size // 2**20)} MiB",
            param="kv_cache_mib",
        )
    return pages
