"""Memory of plans: what kernels read of them on the device, and the pinned memory that it is copied from."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmserve.engine.attention.base import Extent
from mmserve.engine.attention.page_lists import Contexts
from mmserve.models.ops.flashinfer import Copied

Ints = npt.NDArray[np.int32]


class Static:
    """Buffers of steps of decodes, int32, where they stay: graphs of all sizes read the first so many rows.

    ``indices`` has room for ``max_decodes`` contexts of ``max_len`` tokens each: pages that are shared are
    listed for everyone who shares them.
    """

    def __init__(self, extent: Extent, page_size: int, device: torch.device) -> None:
        longest = -(-extent.max_len // page_size)

        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.slots = ints(extent.max_decodes)
        self.ends, self.last = ints(extent.max_decodes + 1), ints(extent.max_decodes)
        self.indices = ints(extent.max_decodes * longest)
        self.common = ints(longest + 1)
        self._common_ends, self._common_last, self._common_rows = ints(3), ints(2), ints(3)
        self._rows = ints(extent.max_decodes + 1)

    def decodes(self, rows: int) -> dict[str, Any]:
        """What a planner for steps of ``rows`` decodes is made with."""
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self.ends[: rows + 1],
            "paged_kv_indices_buffer": self.indices,
            "paged_kv_last_page_len_buffer": self.last[:rows],
        }

    def cascade(self, rows: int) -> dict[str, Any]:
        """The same for a common prefix, which is the first of two levels."""
        return {
            "qo_indptr_buf_arr": [self._common_rows, self._rows[: rows + 1]],
            "paged_kv_indptr_buf_arr": [self._common_ends, self.ends[: rows + 1]],
            "paged_kv_indices_buf_arr": [self.common, self.indices],
            "paged_kv_last_page_len_buf_arr": [self._common_last, self.last[:rows]],
        }


class Pinned:
    """Pinned memory for one step's arrays, from ``begin`` to ``end``, copied when the device comes to it.

    ``begin`` waits until the copies of the step before are done, so nothing is overwritten that was not read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._copied = Copied(device)
        self._memory = self._allocate(1 << 16)
        self._used = 0

    def begin(self) -> None:
        self._copied.wait()
        self._used = 0

    def end(self) -> None:
        self._copied.mark()

    def host(self, values: Ints) -> torch.Tensor:
        """``values`` as a tensor in pinned memory."""
        if self._used + len(values) > len(self._memory):
            # tensors of this step keep the memory that they lie in; the device may still have to copy from it
            self._memory = self._allocate(max(2 * len(self._memory), len(values)))
            self._used = 0
        found = self._memory[self._used : self._used + len(values)]
        found.numpy()[:] = values
        self._used += -(-len(values) // 32) * 32  # the library wants 16 bytes to begin at
        return found

    def send(self, values: Ints, to: torch.Tensor) -> None:
        """``values`` into ``to``, on the device, of the same length."""
        to.copy_(self.host(values), non_blocking=True)

    def contexts(
        self, contexts: Contexts, indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ends, last) on the host, and all pages on the device: at the head of ``indices``, or somewhere."""
        pages = contexts.flat()
        if indices is None:
            indices = torch.empty(len(pages), dtype=torch.int32, device=self._device)
        self.send(pages, indices[: len(pages)])
        return self.host(contexts.ends), self.host(contexts.last), indices[: len(pages)]

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
