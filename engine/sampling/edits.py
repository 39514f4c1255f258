"""What requests ask to be done to their logits before a token is chosen, for all rows of a block at once.

Each kind of edit knows its rows, which are few or all, and touches no others.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mmserve.engine.grammar.mask import steer
from mmserve.engine.sampling.history import History, Tails
from mmserve.engine.scheduler.request import Request

Rows = npt.NDArray[np.int64]


class Edit(Protocol):
    """One kind of edit for some rows of a block."""

    def apply(self, logits: torch.Tensor) -> None:
        """Edit float32 ``logits`` [W, vocab] in place."""

    def advance(self, tokens: Rows) -> None:
        """``tokens`` [W] were chosen."""


class Still:
    """An edit that is the same whatever has been said."""

    def advance(self, tokens: Rows) -> None:
        pass


class Penalties:
    """Repetition over prompt and answer, frequency and presence over the answer.

    Formulas: CTRL (arXiv:1909.05858) for repetition, OpenAI's reference for the other two. Only the logits of
    tokens that were seen are touched. One that stands there twice is read before anything is written, so it
    is written the same twice; the frequency penalty is to be taken off as often as it stands there.
    """

    def __init__(
        self, rows: Rows, requests: Sequence[Request], records: npt.NDArray[np.void], history: History
    ) -> None:
        device = history.answers.tokens.device
        self._rows = rows
        self._history = history
        self._places = history.rows_of(requests)
        self._row = _index(rows, device)[:, None]
        columns = (records[name][:, None].copy() for name in ("repetition", "frequency", "presence"))
        self._repetition, self._frequency, self._presence = (torch.from_numpy(c).to(device) for c in columns)
        self._repeats = bool((records["repetition"] != 1).any())
        self._counts = bool((records["frequency"] != 0).any())
        self._marks = bool((records["presence"] != 0).any())

    def apply(self, logits: torch.Tensor) -> None:
        said, lengths = self._history.answers.get(self._places)
        if self._repeats:
            self._repeat(logits, said, lengths)
        if said.shape[1] == 0:
            return
        there = torch.arange(said.shape[1], device=said.device) < lengths[:, None]
        if self._counts:
            logits.index_put_((self._row, said), -self._frequency * there, accumulate=True)
        if self._marks:
            logits[self._row, said] -= self._presence * (lengths > 0)[:, None]

    def _repeat(self, logits: torch.Tensor, said: torch.Tensor, lengths: torch.Tensor) -> None:
        seen = self._history.prompts.get(self._places)[0]
        if said.shape[1]:
            said = said.where(lengths[:, None] > 0, seen[:, :1])
            seen = torch.cat((seen, said), -1)
        found = logits[self._row, seen]
        logits[self._row, seen] = torch.where(found > 0, found / self._repetition, found * self._repetition)

    def advance(self, tokens: Rows) -> None:
        self._history.append(self._places, tokens[self._rows])


class Biases(Still):
    """Numbers added to the logits of some tokens."""

    def __init__(self, rows: Rows, requests: Sequence[Request], device: torch.device) -> None:
        biases = [r.prepared.sampling.logit_bias for r in requests]
        self._at = _pairs(rows, [list(b) for b in biases], device)
        self._values = torch.tensor([v for b in biases for v in b.values()], device=device)

    def apply(self, logits: torch.Tensor) -> None:
        logits[self._at] += self._values


class Forbidden(Still):
    """Tokens that may not come: stop tokens before ``min_tokens``, words of one token."""

    def __init__(self, rows: Rows, tokens: Sequence[Sequence[int]], device: torch.device) -> None:
        self._at = _pairs(rows, tokens, device)

    def apply(self, logits: torch.Tensor) -> None:
        logits[self._at] = -torch.inf


class Only(Still):
    """The only tokens that may come."""

    def __init__(self, rows: Rows, requests: Sequence[Request], device: torch.device) -> None:
        self._row = _index(rows, device)
        self._at = _pairs(rows, [r.prepared.sampling.allowed_token_ids for r in requests], device)

    def apply(self, logits: torch.Tensor) -> None:
        kept = logits[self._at]
        logits[self._row] = -torch.inf
        logits[self._at] = kept


class BadWords:
    """Words of several tokens: the last of one may not come when the others are the end of the text."""

    def __init__(
        self, rows: Rows, requests: Sequence[Request], words: Sequence[Sequence[tuple[int, ...]]]
    ) -> None:
        self._rows = rows
        self._tails = Tails(requests, max(len(word) for own in words for word in own) - 1)
        flat = [(i, word) for i, own in enumerate(words) for word in own]
        self._owner = np.array([i for i, _ in flat])
        self._last = np.array([word[-1] for _, word in flat])
        self._begins = np.full((len(flat), self._tails.tokens.shape[1]), -1, np.int64)
        for begin, (_, word) in zip(self._begins, flat, strict=True):
            begin[len(begin) - len(word) + 1 :] = word[:-1]

    def apply(self, logits: torch.Tensor) -> None:
        same = (self._begins == self._tails.tokens[self._owner]) | (self._begins < 0)
        due = same.all(1)
        if due.any():
            row, last = self._rows[self._owner[due]], self._last[due]
            logits[_index(row, logits.device), _index(last, logits.device)] = -torch.inf

    def advance(self, tokens: Rows) -> None:
        self._tails.append(tokens[self._rows])


class Steered(Still):
    """Forms of answers: each has a matcher of its own, which is asked for every token."""

    def __init__(self, rows: Rows, requests: Sequence[Request]) -> None:
        self._rows = rows
        self._requests = requests

    def apply(self, logits: torch.Tensor) -> None:
        steer(logits, [r.steering for r in self._requests], self._rows)
        for row, request in zip(self._rows, self._requests, strict=True):
            if not request.may_end:
                logits[row, list(request.stop_ids)] = -torch.inf


def _index(places: Rows, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(places).to(device)


def _pairs(
    rows: Rows, tokens: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) of every token that each row lists, as indices."""
    row = np.repeat(rows, [len(own) for own in tokens])
    token = np.array([t for own in tokens for t in own], np.int64)
    return _index(row, device), _index(token, device)
