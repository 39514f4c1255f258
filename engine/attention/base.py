"""What every attention backend is given and what it does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mmserve.engine.kv.page_table import PageTable


@dataclass(slots=True)
class Span:
    """Rows [row, row + stop - start) of a step are tokens [start, stop) of one request.

    ``table`` holds pages for all ``stop`` tokens; those before ``start`` are in the pool already.
    """

    row: int
    start: int
    stop: int
    table: PageTable

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a plan may become: what buffers that stay are made for."""

    heads: int  # of queries
    max_decodes: int  # rows of the largest step of decodes
    max_len: int  # tokens of the longest context


class AttentionBackend(Protocol):
    """A ``models.forward.Attention`` that is told beforehand, once a step, who sits where.

    ``capturable``: a graph captured under one plan may be replayed under another, because ``forward``
    reads the plan from buffers that stay where they are. That is so for decodes, and for steps with prompts
    of at most ``captured_rows`` rows. Plans of different ``form`` need graphs of their own; ``plan`` sets it.
    """

    capturable: bool
    captured_rows: int
    form: str

    def plan(self, spans: Sequence[Span], num_rows: int) -> None:
        """Prepare a forward of ``num_rows`` rows. Rows in no span are padding: not stored, answered by 0."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor: ...
