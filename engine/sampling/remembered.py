"""What the fused sampler keeps on the device of requests whose next token depends on what they said."""

import numpy as np
import torch

from mmserve.engine.sampling.upload import upload
from mmserve.engine.scheduler.request import Request
from mmserve.models.ops.triton.logits import BLOCK, PROMPT, Work, room, width_of
from mmserve.models.ops.triton.sampling import blocks_in

WORK_BYTES = 256 << 20  # of float32 logits


class Rows:
    """Which row of a table is whose."""

    def __init__(self) -> None:
        self.of: dict[Request, int] = {}
        self._free: list[int] = []

    def take(self, request: Request) -> int:
        row = self.of[request] = self._free.pop() if self._free else len(self.of)
        return row

    def forget(self, request: Request) -> None:
        if request in self.of:
            self._free.append(self.of.pop(request))


class Counts:
    """``table`` int32 [S, vocab]: of each token how often a request has said it, and ``PROMPT`` on top where
    it stands in the prompt of one with a repetition penalty. The kernels that choose a token count it."""

    def __init__(self, device: torch.device, vocab: int) -> None:
        self.table = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self.rows = Rows()

    def row_of(self, request: Request) -> int:
        if request in self.rows.of:
            return self.rows.of[request]
        row = self.rows.take(request)
        if row >= len(self.table):
            self.table = _grown(self.table, (max(8, 2 * len(self.table)), self.table.shape[1]))
        prompt = np.unique(request.token_ids[: request.prompt_len])
        if request.prepared.sampling.repetition_penalty == 1:
            prompt = prompt[:0]
        said, counts = np.unique(request.generated(), return_counts=True)
        tokens = np.union1d(prompt, said)
        values = PROMPT * np.isin(tokens, prompt)
        values[np.searchsorted(tokens, said)] += counts
        device = self.table.device
        self.table[row].zero_()
        self.table[row, upload(tokens.astype(np.int64), device)] = upload(values.astype(np.int32), device)
        return row


class Texts:
    """``table`` int32 [S, longest]: the last tokens of the texts of requests with words that may not be
    finished, and what follows. The kernels that choose a token put it behind the others."""

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(0, 64, dtype=torch.int32, device=device)
        self.rows = Rows()
        self._began: dict[int, tuple[int, int]] = {}  # row: its length when that many tokens were generated

    def row_of(self, request: Request, step: int) -> tuple[int, int]:
        """(row, its length) of ``request``, of which ``step`` tokens were generated."""
        if request not in self.rows.of:
            self._begin(request)
        row = self.rows.of[request]
        length, then = self._began[row]
        return row, length + step - then

    def reach(self, length: int) -> None:
        """Room for texts of ``length`` tokens."""
        height, width = self.table.shape
        if length > width:
            self.table = _grown(self.table, (height, max(length, 2 * width)))

    def _begin(self, request: Request) -> None:
        row = self.rows.take(request)
        if row >= len(self.table):
            self.table = _grown(self.table, (max(8, 2 * len(self.table)), self.table.shape[1]))
        longest = max(map(len, request.prepared.bad_words)) - 1
        tail = request.token_ids[max(request.num_tokens - longest, 0) : request.num_tokens]
        self.reach(len(tail))
        self.table[row, : len(tail)] = upload(tail.astype(np.int32), self.table.device)
        self._began[row] = (len(tail), request.num_generated)


def _rows_at_once(vocab: int) -> int:
    """A multiple of 16 if it is so many: then all parts of a batch begin as well aligned as its first."""
    rows = max(WORK_BYTES // (4 * width_of(vocab)), 1)
    return rows - rows % 16 or rows


def bytes_at_most(vocab: int, rows: int) -> int:
    """What all of this may come to hold on the device when ``rows`` requests run at once, all penalised."""
    at_once = min(2 * rows, _rows_at_once(vocab))
    row = 4 * (width_of(vocab) + 2 * width_of(vocab) // BLOCK + blocks_in(vocab))
    return at_once * row + 4 * vocab * max(8, 2 * rows)  # all of it grows to twice what is needed


class Remembered:
    """Both, and room to work in that batches share."""

    def __init__(self, device: torch.device, vocab: int) -> None:
        self.device = device
        self.counts, self.texts = Counts(device, vocab), Texts(device)
        self._room = room(0, vocab, device)
        self._listed = torch.empty(0, blocks_in(vocab), dtype=torch.int32, device=device)
        self.most_rows = _rows_at_once(vocab)

    def room(self, rows: int) -> tuple[Work, torch.Tensor]:
        """``Work`` and ``listed`` for ``rows`` rows. Whoever takes it has it until the next one does."""
        if rows > len(self._listed):
            rows_now = min(max(rows, 2 * len(self._listed)), self.most_rows)
            vocab = self.counts.table.shape[1]
            self._room = room(rows_now, vocab, self.device)
            self._listed = self._listed.new_empty(rows_now, self._listed.shape[1])
        return Work(*(part[:rows] for part in self._room)), self._listed[:rows]

    def forget(self, request: Request) -> None:
        self.counts.rows.forget(request)
        self.texts.rows.forget(request)


def _grown(table: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """``table`` with room for more, which is zero."""
    larger = table.new_zeros(shape)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
