"""Rows of a batch that are worked on together, and the batch of which they are blocks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mmserve.engine.sampling import edits
from mmserve.engine.sampling.draw import Cuts, draw, draw_cut
from mmserve.engine.sampling.edits import Edit, Rows
from mmserve.engine.sampling.greedy import greedy
from mmserve.engine.sampling.history import History
from mmserve.engine.sampling.noise import uniforms
from mmserve.engine.sampling.slots import (
    ALLOWED,
    BARRED,
    BIASED,
    CUT,
    DRAWN,
    HELD,
    PENALISED,
    STEERED,
)
from mmserve.engine.scheduler.request import Request

Records = npt.NDArray[np.void]

NO_TOKEN = -1  # chosen where every token is forbidden


class Block:
    """``rows`` of a batch, all drawn in one way or all greedy: what they ask for as tensors, kept for as long
    as the same requests come."""

    def __init__(self, rows: Rows, requests: Sequence[Request], records: Records, history: History) -> None:
        self.rows = rows
        self._seeds, self._steps = records["seed"].copy(), records["step"].copy()
        device = history.device
        self._index = rows_index(rows, device)
        self._edits = _edits_of(requests, records, history)
        self._barring = bool((records["kind"] & (ALLOWED | BARRED | HELD | STEERED)).any())
        self.barred = rows[:0]
        drawn, cut = records["kind"][0] & DRAWN, records["kind"][0] & CUT
        temperature = torch.from_numpy(records["temperature"][:, None].copy()).to(device)
        self._temperature = temperature if drawn else None
        names = ("top_k", "top_p", "min_p")
        self._cuts = Cuts(*(records[name].copy() for name in names)) if cut else None

    def choose(self, logits: torch.Tensor, buffer: torch.Tensor, age: int) -> Rows:
        """The next token of each of its rows, from ``logits`` [R, vocab] of the whole batch. ``buffer``, in
        float32, has room for its rows; ``age`` is how many tokens they had since the block was made. In the
        rows of ``barred`` every token was forbidden, so theirs means nothing."""
        work = buffer[: len(self.rows)]
        work.copy_(logits[self._index])
        for edit in self._edits:
            edit.apply(work)
        tokens = greedy(work) if self._temperature is None else self._drawn(work, age)
        for edit in self._edits:
            edit.advance(tokens)
        if self._barring:
            self.barred = self.rows[_chosen(work, tokens) == -np.inf]
        return tokens

    def _drawn(self, work: torch.Tensor, age: int) -> Rows:
        assert self._temperature is not None
        uniform = uniforms(self._seeds, self._steps + age)
        work.div_(self._temperature)
        tokens = draw(work, uniform) if self._cuts is None else draw_cut(work, self._cuts, uniform)
        return tokens.clip(max=work.shape[1] - 1)


def _chosen(work: torch.Tensor, tokens: Rows) -> npt.NDArray[np.float32]:
    """The logits in ``work`` [W, vocab] of ``tokens`` [W], on the host."""
    index = torch.from_numpy(tokens).to(work.device)
    return work.gather(1, index[:, None])[:, 0].cpu().numpy()


def rows_index(rows: Rows, device: torch.device) -> slice | torch.Tensor:
    """For indexing rows: a slice, which copies nothing, where they follow each other."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _edits_of(requests: Sequence[Request], records: Records, history: History) -> list[Edit]:
    """The edits that any of the rows needs, in the order in which they are made."""
    kind, device, made = records["kind"], history.device, list[Edit]()

    def needing(flag: int, without: int = 0) -> tuple[Rows, list[Request]]:
        rows = np.flatnonzero((kind & flag != 0) & (kind & without == 0))
        return rows, [requests[i] for i in rows.tolist()]

    rows, those = needing(PENALISED)
    if those:
        made.append(edits.Penalties(rows, those, records[rows], history))
    rows, those = needing(BIASED)
    if those:
        made.append(edits.Biases(rows, those, device))
    rows, those = needing(ALLOWED)
    if those:
        made.append(edits.Only(rows, those, device))
    rows, those = needing(BARRED)
    if those:
        made += _bad_words(rows, those, device)
    rows, those = needing(HELD, without=STEERED)
    if those:
        made.append(edits.Forbidden(rows, [list(r.stop_ids) for r in those], device))
    rows, those = needing(STEERED)
    if those:
        made.append(edits.Steered(rows, those))
    return made


def _bad_words(rows: Rows, requests: Sequence[Request], device: torch.device) -> list[Edit]:
    words = [r.prepared.bad_words for r in requests]
    short = [[w[0] for w in own if len(w) == 1] for own in words]
    long = [[w for w in own if len(w) > 1] for own in words]
    made: list[Edit] = [edits.Forbidden(rows, short, device)] if any(short) else []
    return [*made, edits.BadWords(rows, requests, long)] if any(long) else made
