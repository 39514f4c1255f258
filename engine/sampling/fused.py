"""The rows of one step as records for kernels: everything is done on the device, and nobody waits for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmserve.core.messages import TokenLogprob
from mmserve.engine.sampling.block import NO_TOKEN, Records
from mmserve.engine.sampling.drawn import Drawn, Sampled, on_device
from mmserve.engine.sampling.remembered import Remembered
from mmserve.engine.sampling.report import BLOCK_BYTES
from mmserve.engine.sampling.slots import (
    ALLOWED,
    BARRED,
    BIASED,
    CUT,
    DRAWN,
    EDITED,
    HELD,
    PENALISED,
    REPORTED,
    STEERED,
)
from mmserve.engine.sampling.upload import upload
from mmserve.engine.scheduler.request import Request
from mmserve.models.ops.triton.logits import FLOAT_COLUMNS, INT_COLUMNS, Edits, Words, bar_words, edit
from mmserve.models.ops.triton.sampling import choose

Ints = npt.NDArray[np.int64]
Entry = tuple[int, float]  # a token, and what is added to its logit


class FusedBatch:
    """The rows of one step, for as long as the same requests come (``batch.SamplingBatch``: the plain form).

    What requests ask is uploaded when this is made; a step launches the kernels with ``age``, the number of
    tokens that each row has had since. Only forms of answers are asked on the host, for their masks. At
    ``ends`` one of the rows changes its kind, so that this must be made anew.
    """

    def __init__(
        self, requests: Sequence[Request], records: Records, remembered: Remembered, vocab: int
    ) -> None:
        """``records`` [R] are the requests' own, as they are at this moment."""
        self.requests = list(requests)
        self.age = 0
        kind = records["kind"]
        left = (records["may_end"] - records["step"])[kind & HELD != 0]
        self.ends = int(left.min()) if len(left) else None
        self.plain = not (kind & (DRAWN | EDITED | REPORTED)).any()
        if self.plain:
            return
        self._remembered, self._device, self._vocab = remembered, remembered.device, vocab
        self._steered = self._of(kind, STEERED)
        ints = _ints(records, vocab)
        self._lasting(ints, kind)
        entries, words = self._entries(ints, kind)
        self._longest = int(ints["length"].max())
        masks = _masks([r.prepared.sampling.allowed_token_ids for r in self._of(kind, ALLOWED)], vocab)
        self._edits = Edits(
            ints=self._upload(ints.view(np.int64).reshape(len(records), -1)),
            floats=self._upload(_floats(records)),
            counts=remembered.counts.table,
            masks=self._upload(masks),
            grammars=self._upload(_masks([], vocab)),
            tokens=self._upload(np.array([token for token, _ in entries], np.int32)),
            values=self._upload(np.array([value for _, value in entries], np.float32)),
        )
        self._words = None if words is None else Words(*map(self._upload, words))
        self._reported = _Reported(records, self._device, vocab)

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether it is still the batch of ``requests``."""
        if self.requests != requests or self.age == self.ends:
            return False
        return self.plain or all(r.steering is not None for r in self._steered)

    def draw(self, logits: torch.Tensor) -> Drawn:
        """The next token of each row of ``logits`` [R, vocab], on the device: ``ids`` are of the vocabulary
        also where every token is forbidden, which the results tell."""
        age, self.age = self.age, self.age + 1
        if self.plain:
            return on_device(logits.argmax(-1))
        edits = self._edits._replace(grammars=self._grammars()) if self._steered else self._edits
        texts = self._remembered.texts
        texts.reach(self._longest + age + 1)
        if self._words is not None:
            bar_words(self._words, edits.ints, texts.table, edits.tokens, age)
        chosen = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        barred = torch.empty(len(logits), dtype=torch.int8, device=self._device)
        for start in range(0, len(logits), self._remembered.most_rows):
            rows = slice(start, start + self._remembered.most_rows)
            own = edits._replace(ints=edits.ints[rows], floats=edits.floats[rows])
            work, listed = self._remembered.room(len(own.ints))
            edit(logits[rows], own, work)
            choose(work, own, texts.table, listed, self._vocab, age, chosen[rows], barred[rows])
        scores = self._reported.scores(logits, chosen)
        return Drawn(chosen, (chosen, barred, *scores), self._results)

    def sample(self, logits: torch.Tensor) -> tuple[list[int], list[TokenLogprob | None]]:
        """As ``draw``, read at once."""
        drawn = self.draw(logits)
        sampled = drawn.results(*(copy.cpu().numpy() for copy in drawn.copies))
        return [token for token, _ in sampled], [logprob for _, logprob in sampled]

    def _results(
        self, tokens: Ints, barred: npt.NDArray[np.int8], *scores: npt.NDArray[Any]
    ) -> list[Sampled]:
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        for row, entry in self._reported.entries(tokens, *scores):
            logprobs[row] = entry
        return list(zip(np.where(barred != 0, NO_TOKEN, tokens).tolist(), logprobs, strict=True))

    # ------------------------------------------------------------ what the records say

    def _lasting(self, ints: Any, kind: Ints) -> None:
        """Rows of what is remembered; made first, since the tables may move when they grow."""
        remembered = self._remembered
        for row in _rows(kind, PENALISED):
            ints["state"][row] = remembered.counts.row_of(self.requests[row])
        for row in _rows(kind, BARRED):
            request = self.requests[row]
            if any(len(word) > 1 for word in request.prepared.bad_words):
                ints["text"][row], ints["length"][row] = remembered.texts.row_of(
                    request, int(ints["step"][row])
                )

    def _entries(self, ints: Any, kind: Ints) -> tuple[list[Entry], tuple[npt.NDArray[Any], ...] | None]:
        """Entries of all rows, and words of several tokens (``Words`` on the host), each with an entry of its
        own that the kernel fills in."""
        entries: list[Entry] = []
        words: list[tuple[int, int, tuple[int, ...]]] = []
        for row in _rows(kind, BIASED | BARRED | HELD):
            request, flags = self.requests[row], int(kind[row])
            ints["begin"][row] = len(entries)
            if flags & BIASED:
                entries += request.prepared.sampling.logit_bias.items()
            if flags & HELD and not flags & STEERED:
                entries += [(token, -np.inf) for token in request.stop_ids]
            for word in request.prepared.bad_words if flags & BARRED else ():
                if len(word) > 1:
                    words.append((row, len(entries), word))
                entries.append((word[0] if len(word) == 1 else -1, -np.inf))
            ints["end"][row] = len(entries)
        if not words:
            return entries, None
        begins = np.full((len(words), max(len(word) for _, _, word in words) - 1), -1, np.int32)
        for begin, (_, _, word) in zip(begins, words, strict=True):
            begin[: len(word) - 1] = word[:-1]
        metas = np.array([(row, entry, word[-1], len(word) - 1) for row, entry, word in words], np.int32)
        return entries, (begins, metas)

    def _grammars(self) -> torch.Tensor:
        """What the forms of answers allow next: int32 [steered rows, ceil(vocab / 32)]."""
        bits = np.full((len(self._steered), -(-self._vocab // 32)), -1, np.int32)
        for row, request in zip(bits, self._steered, strict=True):
            assert request.steering is not None
            request.steering.allow(row)
            if not request.may_end:
                _set_bits(row, request.stop_ids, allowed=False)
        return self._upload(bits)

    def _of(self, kind: Ints, flag: int) -> list[Request]:
        return [self.requests[row] for row in _rows(kind, flag)]

    def _upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return upload(values, self._device)


def compile_beforehand(remembered: Remembered, dtype: torch.dtype) -> None:
    """Launch each kernel once, on a row of nothing in ``dtype``, so that no draw waits for a compiler."""
    vocab, device = remembered.counts.table.shape[1], remembered.device
    records = _columns(INT_COLUMNS, np.int64, 1)
    for name in ("state", "text", "mask", "grammar"):
        records[name] = -1
    records["text"], records["length"] = 0, 1
    texts = torch.zeros(1, remembered.texts.table.shape[1], dtype=torch.int32, device=device)
    floats = torch.ones(1, len(FLOAT_COLUMNS), device=device)
    ints = upload(records.view(np.int64).reshape(1, -1), device)
    words = Words(*(upload(np.zeros((1, n), np.int32), device) for n in (2, 4)))
    tokens = upload(np.full(1, -1, np.int32), device)
    masks = torch.zeros(0, -(-vocab // 32), dtype=torch.int32, device=device)
    edits = Edits(ints, floats, remembered.counts.table, masks, masks, tokens, torch.zeros(1, device=device))
    chosen = torch.empty(1, dtype=torch.int64, device=device)
    work, listed = remembered.room(1)
    bar_words(words, ints, texts, tokens, 0)
    edit(torch.zeros(1, vocab, dtype=dtype, device=device), edits, work)
    choose(work, edits, texts, listed, vocab, 0, chosen, torch.empty(1, dtype=torch.int8, device=device))


class _Reported:
    """The rows whose log-probabilities are told: the model's own, before anything is done to its logits."""

    def __init__(self, records: Records, device: torch.device, vocab: int) -> None:
        self._rows = np.flatnonzero(records["kind"] & REPORTED)
        self._index = upload(self._rows, device)
        self._counts = records["logprobs"][self._rows]
        self._most = max(BLOCK_BYTES // (4 * vocab), 1)
        self._top = min(int(self._counts.max()), vocab) if len(self._rows) else 0

    def scores(self, logits: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of N rows float32 [N] of the chosen tokens, and of the likeliest float32 and int64 [N, top];
        nothing where nobody asks."""
        if not len(self._rows):
            return ()
        parts = [_scores(logits, chosen, index, self._top) for index in self._index.split(self._most)]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def entries(self, tokens: Ints, *scores: npt.NDArray[Any]) -> list[tuple[int, TokenLogprob]]:
        """(row, its entry), from all that ``scores`` returned, on the host."""
        if not scores:
            return []
        own, values, ids = (score.tolist() for score in scores)
        told = zip(self._rows.tolist(), self._counts.tolist(), own, values, ids, strict=True)
        return [
            (row, TokenLogprob(int(tokens[row]), score, tuple(zip(best, best_values, strict=True))[:count]))
            for row, count, score, best_values, best in told
        ]


def _scores(
    logits: torch.Tensor, chosen: torch.Tensor, index: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = logits.index_select(0, index).float()
    total = raw.logsumexp(-1, keepdim=True)
    own = raw.gather(1, chosen.index_select(0, index)[:, None]) - total
    values, ids = raw.topk(top)
    return own[:, 0], values - total, ids


def _columns(names: Sequence[str], dtype: type, rows: int) -> Any:
    """Records of ``rows`` rows whose columns can be set by name, and which are a matrix."""
    return np.zeros(rows, [(name, dtype) for name in names])


def _ints(records: Records, vocab: int) -> Any:
    """``INT_COLUMNS`` as far as the records tell them."""
    kind = records["kind"]
    ints = _columns(INT_COLUMNS, np.int64, len(records))
    ints["seed"] = records["seed"].astype(np.uint64).view(np.int64)
    ints["step"], ints["top_k"] = records["step"], np.minimum(records["top_k"], vocab)
    ints["drawn"], ints["cut"] = kind & DRAWN != 0, kind & CUT != 0
    ints["barring"] = kind & (ALLOWED | BARRED | HELD | STEERED) != 0
    ints["state"] = ints["text"] = -1
    for name, flag in (("mask", ALLOWED), ("grammar", STEERED)):  # rows in the order of who has one
        has = kind & flag != 0
        ints[name] = np.where(has, has.cumsum() - 1, -1)
    return ints


def _floats(records: Records) -> npt.NDArray[np.float32]:
    floats = _columns(FLOAT_COLUMNS, np.float32, len(records))
    floats["temperature"] = np.where(records["kind"] & DRAWN != 0, records["temperature"], 1)
    with np.errstate(divide="ignore"):
        floats["log_min_p"] = np.log(records["min_p"])
    for name in ("top_p", "repetition", "frequency", "presence"):
        floats[name] = records[name]
    return floats.view(np.float32).reshape(len(records), -1)


def _rows(kind: Ints, flag: int) -> list[int]:
    return np.flatnonzero(kind & flag).tolist()


def _masks(allowed: Sequence[Sequence[int]], vocab: int) -> npt.NDArray[np.int32]:
    """int32 [rows, ceil(vocab / 32)] of the only tokens that each row allows."""
    bits = np.zeros((len(allowed), -(-vocab // 32)), np.int32)
    for row, tokens in zip(bits, allowed, strict=True):
        _set_bits(row, tokens, allowed=True)
    return bits


def _set_bits(row: npt.NDArray[np.int32], tokens: Sequence[int] | frozenset[int], *, allowed: bool) -> None:
    """Bit t % 32 of word t // 32 for each of ``tokens``."""
    words = row.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << (token % 32))
        words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
