"""From examples to tensors: the chat layout, M-RoPE positions, the loss mask, patches, batches.

A batch holds pictures (or clips) of one grid. Each picture may serve several rows (conversations), and
the rows are padded in a few groups of like length, so that short questions do not pay for placards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mmserve.models.tiny.example import Example, Turn
from mmserve.models.tiny.net import Grid, Rows

PATCH, MERGE = 16, 2


def patchify(frames: np.ndarray) -> np.ndarray:
    """uint8 [F, H, W, 3] to [F or F/2, patches, pixels] in merge order, channels before time.

    A still keeps 768 numbers a patch (the net sums the kernel's two temporal halves); a pair has 1536.
    """
    f, h, w, c = frames.shape
    depth = 1 if f == 1 else 2
    cell = PATCH * MERGE
    x = frames.reshape(f // depth, depth, h // cell, MERGE, PATCH, w // cell, MERGE, PATCH, c)
    x = x.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(x).reshape(f // depth, (h // PATCH) * (w // PATCH), -1)


@dataclass(slots=True)
class Row:
    """One conversation in tokens. ``spans``: (first token, picture, frame pair) of each vision item."""

    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    bounds: list[tuple[int, int]] = field(default_factory=list)  # of each turn in ``wanted``


@dataclass(frozen=True, slots=True)
class Batch:
    """``targets`` and ``weights`` [S] follow ``groups`` in order; ``marks`` names turns: (turn, from, to)."""

    patches: Tensor
    grid: Grid
    groups: tuple[Rows, ...]
    targets: Tensor
    weights: Tensor
    marks: tuple[tuple[Turn, int, int], ...]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return found


class Layout:
    """Lays conversations out as the chat template and the processors do.

    ``rng``, where given to ``row``, varies what callers vary: the text before the picture, a system
    message, and the outer start and end marks that newer processors leave around a clip.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ident = partial(token_id, tokenizer)
        self.start, self.end = ident("<|im_start|>"), ident("<|im_end|>")
        self.vision_start, self.vision_end = ident("<|vision_start|>"), ident("<|vision_end|>")
        self.pads = {"image": ident("<|image_pad|>"), "video": ident("<|video_pad|>")}
        self.encode = lru_cache(maxsize=50000)(lambda text: tuple(tokenizer.encode(text).ids))

    @staticmethod
    def media(example: Example) -> str:
        return "image" if len(example.frames) == 1 else "video"

    def row(
        self,
        conversation: Sequence[tuple[Example, Sequence[Turn] | None]],
        pictures: Sequence[int] = (0,),
        rng: np.random.Generator | None = None,
        answered: bool = True,
    ) -> Row:
        """Tokens of a conversation about one picture, or several in a row.

        ``None`` for the turns means all of the example's. ``pictures`` numbers each example within its
        batch. Unless ``answered``, the last answer is left out and the row ends where it would begin.
        """
        row = Row()
        chance = rng.random(3) if rng is not None else np.ones(3)
        if chance[0] < 0.06:
            row.ids += [self.start, *self.encode("system\nYou are a helpful assistant."), self.end]
            row.ids += self.encode("\n")
        for (example, turns), picture in zip(conversation, pictures, strict=True):
            for index, turn in enumerate(turns or example.turns):
                media = (example, picture) if index == 0 and len(example.frames) else None
                self._question(row, turn, media, text_first=chance[1] < 0.15, outer=chance[2] < 0.3)
                self._answer(row, turn)
        if not answered:
            first, last = row.bounds[-1]
            keep = row.wanted[first] + 1
            del row.ids[keep:], row.wanted[first + 1 : last]
        return row

    def _question(
        self, row: Row, turn: Turn, media: tuple[Example, int] | None, text_first: bool, outer: bool
    ) -> None:
        row.ids.append(self.start)
        if media is None:
            row.ids += self.encode("user\n" + turn.question)
        elif text_first:
            row.ids += self.encode("user\n" + turn.question)
            self._media(row, *media, outer)
        else:
            row.ids += self.encode("user\n")
            self._media(row, *media, outer)
            row.ids += self.encode(turn.question)
        row.ids += [self.end, *self.encode("\n"), self.start, *self.encode("assistant\n")]

    def _answer(self, row: Row, turn: Turn) -> None:
        answer = [*self.encode(turn.answer), self.end]
        first = len(row.ids) - 1
        row.bounds.append((len(row.wanted), len(row.wanted) + len(answer)))
        row.wanted += range(first, first + len(answer))
        row.weights += [len(answer) ** -0.35] * len(answer)
        row.turns.append(turn)
        row.ids += [*answer, *self.encode("\n")]

    def _media(self, row: Row, example: Example, picture: int, outer: bool) -> None:
        frames, height, width, _ = example.frames.shape
        count = height * width // (PATCH * MERGE) ** 2
        kind = self.media(example)
        outer = outer and kind == "video"
        if outer:
            row.ids.append(self.vision_start)
        for pair in range(max(1, frames // 2)):
            if kind == "video":
                row.ids += self.encode(f"<{(2 * pair + 0.5) / example.fps:.1f} seconds>")
            row.ids.append(self.vision_start)
            row.spans.append((len(row.ids), picture, pair))
            row.ids += [self.pads[kind]] * count + [self.vision_end]
        if outer:
            row.ids.append(self.vision_end)


def positions(row: Row, grid: Grid) -> np.ndarray:
    """M-RoPE positions [3, L]: an item spans max(rows, cols) of its merged grid, text counts on."""
    rows, cols = grid[0] // MERGE, grid[1] // MERGE
    steps = np.ones(len(row.ids), np.int64)
    for start, _, _ in row.spans:
        steps[start : start + rows * cols] = 0
        steps[start] = max(rows, cols)
    base = np.concatenate([[0], np.cumsum(steps)[:-1]])
    out = np.stack([base] * 3)
    for start, _, _ in row.spans:
        span = slice(start, start + rows * cols)
        out[0, span] = base[start]
        out[1, span] = base[start] + np.repeat(np.arange(rows), cols)
        out[2, span] = base[start] + np.tile(np.arange(cols), rows)
    return out


def pad_rows(rows: Sequence[Row], grid: Grid, offsets: np.ndarray, multiple: int = 8) -> Rows:
    """Pad ``rows`` to one length; ``offsets`` is the first vision item of each picture."""
    length = -(-max(len(row.ids) for row in rows) // multiple) * multiple
    count = grid[0] * grid[1] // MERGE**2
    ids = np.zeros((len(rows), length), np.int64)
    pos = np.zeros((3, len(rows), length), np.int64)
    slots, sources, wanted = [], [], []
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        pos[:, index, : len(row.ids)] = positions(row, grid)
        wanted += [index * length + p for p in row.wanted]
        for start, picture, pair in row.spans:
            slots.append(index * length + start + np.arange(count))
            sources.append((offsets[picture] + pair) * count + np.arange(count))
    as_tensor = torch.from_numpy
    return Rows(
        as_tensor(ids),
        as_tensor(pos),
        as_tensor(np.concatenate(slots)),
        as_tensor(np.concatenate(sources)),
        torch.tensor(wanted),
    )


def group_cuts(lengths: Sequence[int], groups: int, multiple: int = 8) -> list[int]:
    """Where to cut sorted ``lengths`` into at most ``groups`` runs of two or more, padding the least."""
    count = len(lengths)
    padded = -(-np.asarray(lengths) // multiple) * multiple
    best = np.full(count + 1, np.inf)
    best[0] = 0
    back: list[np.ndarray] = []
    for _ in range(max(1, min(groups, count // 2))):
        cost, origin = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
        for last in range(min(2, count), count + 1):
            starts = np.arange(max(1, last - 1))
            totals = best[: len(starts)] + (last - starts) * padded[last - 1]
            origin[last] = int(totals.argmin())
            cost[last] = totals[origin[last]]
        best = cost
        back.append(origin)
    cuts = [count]
    for origin in reversed(back):
        cuts.append(int(origin[cuts[-1]]))
    return cuts[::-1]


def collate(rows: Sequence[Row], pictures: Sequence[np.ndarray], grid: Grid, groups: int = 1) -> Batch:
    """One batch; ``pictures`` are patchified items, numbered as the rows' spans say."""
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in pictures])[:-1]])
    rows = sorted(rows, key=lambda row: len(row.ids))
    cuts = group_cuts([len(row.ids) for row in rows], groups)
    parts = [rows[first:last] for first, last in pairwise(cuts)]
    targets: list[int] = []
    weights, marks = [], []
    for row in rows:
        first = len(targets)
        targets += [row.ids[p + 1] if p + 1 < len(row.ids) else 0 for p in row.wanted]
        weights += row.weights[: len(row.wanted)]
        marks += [(turn, first + a, first + b) for turn, (a, b) in zip(row.turns, row.bounds, strict=True)]
    return Batch(
        torch.from_numpy(np.concatenate(pictures)),
        grid,
        tuple(pad_rows(part, grid, offsets) for part in parts),
        torch.tensor(targets),
        torch.tensor(weights),
        tuple(marks),
    )
