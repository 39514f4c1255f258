"""The tokens behind each row, for whoever is penalised for saying them again."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mmserve.engine.scheduler.request import Request


class TokenTable:
    """Lists of tokens of many lengths as one tensor. A row's unused places repeat a token that it has, so
    that what is written there twice is the same; a row without any has 0 there."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(8, 64, dtype=torch.int64, device=device)
        self.lengths = np.zeros(8, np.int64)

    def put(self, row: int, tokens: npt.NDArray[np.integer]) -> None:
        """Begin ``row`` anew."""
        self._reach(row + 1, len(tokens))
        self.tokens[row] = int(tokens[0]) if len(tokens) else 0
        self.tokens[row, : len(tokens)] = self._there(tokens.astype(np.int64))
        self.lengths[row] = len(tokens)

    def append(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """One token more for each of ``rows``."""
        lengths = self.lengths[rows]
        self._reach(0, int(lengths.max()) + 1)
        row, place, values = (self._there(x) for x in (rows, lengths, tokens))
        first = np.flatnonzero(lengths == 0)
        if len(first):
            self.tokens[self._there(rows[first])] = values[self._there(first), None]
        self.tokens[row, place] = values
        self.lengths[rows] = lengths + 1

    def get(self, rows: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [P, longest] tokens of ``rows``, and their lengths [P]."""
        lengths = self.lengths[rows]
        return self.tokens[self._there(rows), : int(lengths.max())], self._there(lengths)

    def _there(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.tokens.device)

    def _reach(self, rows: int, length: int) -> None:
        """Room for so many, at least doubled where there is less."""
        old = self.tokens
        height = old.shape[0] if rows <= old.shape[0] else max(rows, 2 * old.shape[0])
        width = old.shape[1] if length <= old.shape[1] else max(length, 2 * old.shape[1])
        if (height, width) == tuple(old.shape):
            return
        self.tokens = old.new_zeros(height, width)
        self.tokens[: old.shape[0]] = old[:, :1]
        self.tokens[: old.shape[0], : old.shape[1]] = old
        self.lengths = np.concatenate((self.lengths, np.zeros(height - len(self.lengths), np.int64)))


class History:
    """Prompts (each token once) and answers of requests with penalties, a row each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.prompts, self.answers = TokenTable(device), TokenTable(device)
        self._rows: dict[Request, int] = {}
        self._free: list[int] = []

    def rows_of(self, requests: Sequence[Request]) -> npt.NDArray[np.int64]:
        """The rows of ``requests``, made for those that have none."""
        return np.array([self._rows[r] if r in self._rows else self._add(r) for r in requests], np.int64)

    def forget(self, request: Request) -> None:
        if request in self._rows:
            self._free.append(self._rows.pop(request))

    def append(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        self.answers.append(rows, tokens)

    def _add(self, request: Request) -> int:
        row = self._rows[request] = self._free.pop() if self._free else len(self._rows)
        repeats = request.prepared.sampling.repetition_penalty != 1
        prompt = request.token_ids[: request.prompt_len]
        self.prompts.put(row, np.unique(prompt) if repeats else prompt[:0])
        self.answers.put(row, request.generated())
        return row


class Tails:
    """The last ``width`` tokens of each row's text, newest last; -1 before its beginning."""

    def __init__(self, requests: Sequence[Request], width: int) -> None:
        self.tokens = np.full((len(requests), width), -1, np.int64)
        for tail, request in zip(self.tokens, requests, strict=True):
            end = request.token_ids[max(request.num_tokens - width, 0) : request.num_tokens]
            tail[width - len(end) :] = end

    def append(self, tokens: npt.NDArray[np.int64]) -> None:
        self.tokens[:, :-1] = self.tokens[:, 1:]
        self.tokens[:, -1] = tokens
