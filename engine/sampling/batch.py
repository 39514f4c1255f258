"""What the sampler keeps from step to step, for as long as the same requests come."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mmserve.core.messages import TokenLogprob
from mmserve.engine.sampling.block import NO_TOKEN, Block, Records, rows_index
from mmserve.engine.sampling.drawn import Drawn, on_device, on_host
from mmserve.engine.sampling.edits import Rows
from mmserve.engine.sampling.greedy import greedy
from mmserve.engine.sampling.history import History
from mmserve.engine.sampling.report import reported
from mmserve.engine.sampling.slots import CUT, DRAWN, EDITED, HELD, REPORTED, STEERED
from mmserve.engine.scheduler.request import Request

BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}  # of float32 logits; on a CPU they stay in its cache


class SamplingBatch:
    """The rows of one step. ``age`` counts the tokens that each has had since this was made, and at ``ends``
    one of them changes its kind, so that it must be made anew."""

    def __init__(self, requests: Sequence[Request], records: Records, history: History, vocab: int) -> None:
        """``records`` [R] are the requests' own, as they are at this moment."""
        self.requests = list(requests)
        self.age = 0
        held = records["kind"] & HELD != 0
        left = (records["may_end"] - records["step"])[held]
        self.ends = int(left.min()) if len(left) else None
        self.plain = not (records["kind"] & (DRAWN | EDITED | REPORTED)).any()
        if self.plain:
            return
        most = max(BLOCK_BYTES[history.device.type] // (4 * vocab), 1)
        self._blocks = [
            Block(rows, [self.requests[i] for i in rows.tolist()], records[rows], history)
            for rows in _alike(records["kind"], most)
        ]
        self._greedy = np.flatnonzero(records["kind"] & (DRAWN | EDITED) == 0)
        self._greedy_index = rows_index(self._greedy, history.device)
        self._reported = np.flatnonzero(records["kind"] & REPORTED)
        self._counts = records["logprobs"][self._reported]
        self._steered = [self.requests[i] for i in np.flatnonzero(records["kind"] & STEERED).tolist()]
        self._buffer = torch.empty(
            max((len(b.rows) for b in self._blocks), default=0), vocab, device=history.device
        )

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether it is still the batch of ``requests``."""
        if self.requests != requests or self.age == self.ends:
            return False
        return self.plain or all(r.steering is not None for r in self._steered)

    def draw(self, logits: torch.Tensor) -> Drawn:
        """As ``sample``, left on the device where nothing of it is the host's work."""
        if self.plain and logits.device.type != "cpu":
            self.age += 1
            return on_device(logits.argmax(-1))
        return on_host(*self.sample(logits), logits.device)

    def sample(self, logits: torch.Tensor) -> tuple[list[int], list[TokenLogprob | None]]:
        """The next token of each row of ``logits`` [R, vocab], and its log-probability if that is wanted;
        NO_TOKEN where every token is forbidden."""
        self.age += 1
        unreported: list[TokenLogprob | None] = [None] * len(self.requests)
        if self.plain:
            return greedy(logits).tolist(), unreported
        tokens = np.empty(len(self.requests), np.int64)
        if len(self._greedy):
            tokens[self._greedy] = greedy(logits[self._greedy_index])
        for block in self._blocks:
            tokens[block.rows] = block.choose(logits, self._buffer, self.age - 1)
        if len(self._reported):
            for row, entry in reported(logits, self._reported, tokens[self._reported], self._counts):
                unreported[row] = entry
        for block in self._blocks:
            tokens[block.barred] = NO_TOKEN
        return tokens.tolist(), unreported


def _alike(kind: Rows, most: int) -> Iterator[Rows]:
    """The rows that are not greedy and untouched, in groups of one way to choose and at most ``most``."""
    ways = [
        (kind & CUT != 0),
        (kind & DRAWN != 0) & (kind & CUT == 0),
        (kind & DRAWN == 0) & (kind & EDITED != 0),
    ]
    for way in ways:
        rows = np.flatnonzero(way)
        yield from (rows[i : i + most] for i in range(0, len(rows), most))
