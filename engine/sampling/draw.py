"""Drawing a token from each row: temperature, then min-p, top-k and top-p, in vLLM's order."""

from dataclasses import dataclass

import numpy as np
import torch

from mmserve.engine.sampling.leaders import (
    Floats,
    Ints,
    at_least,
    block_maxima,
    block_of,
    block_sums,
    host,
    nth_bound,
)

FIRST_LOOK = 128  # candidates that usually hold the nucleus; sorting 150,000 would take 17 ms a row
WIDER = 8


@dataclass(frozen=True, slots=True)
class Cuts:
    """What is cut off each row before the draw. All [S]: ``top_k`` int64 (0 is off), the others float32."""

    top_k: Ints
    top_p: Floats
    min_p: Floats

    def of(self, rows: Ints) -> "Cuts":
        return Cuts(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw(x: torch.Tensor, uniform: Floats) -> Ints:
    """Tokens [S] of logits ``x`` float32 [S, V] over their temperature: the distribution inverted at
    ``uniform`` float64 [S], block first, so that one pass adds it up.

    Each row's result depends on that row alone, here and in ``draw_cut``.
    """
    weights = (x - x.amax(-1, keepdim=True)).exp_()
    sums = block_sums(weights).cumsum(-1)
    target = uniform * sums[:, -1]
    block = _inverted(sums, target)
    before = np.where(block > 0, sums[np.arange(len(block)), block - 1], 0)
    places = block[:, None] * block_of(x.shape[1]) + np.arange(block_of(x.shape[1]))
    index = torch.from_numpy(places.clip(max=x.shape[1] - 1)).to(x.device)
    inside = np.where(places < x.shape[1], host(weights.gather(1, index)), 0)
    found = _inverted(inside.cumsum(-1, dtype=np.float64), target - before)
    return places[np.arange(len(found)), found]


def draw_cut(x: torch.Tensor, cuts: Cuts, uniform: Floats) -> Ints:
    """As ``draw``, from what ``cuts`` leave of each row: few candidates, so most of a row is compared once
    and no more."""
    maxima = block_maxima(x)
    values, ids = at_least(x, threshold(x, maxima, cuts))
    cumulated = _weights(values, maxima).cumsum(-1)
    return ids[np.arange(len(ids)), _inverted(cumulated, uniform * cumulated[:, -1])]


def _inverted(cumulated: Floats, target: Floats) -> Ints:
    """Where each row of ``cumulated`` [S, N] first goes beyond ``target`` [S]: something that has a share of
    its own, also where rounding puts the target at the very end."""
    found = (cumulated <= target[:, None]).sum(-1)
    last = (cumulated < cumulated[:, -1:]).sum(-1)
    return np.minimum(found, last).clip(max=cumulated.shape[1] - 1)


def _weights(values: Floats, maxima: Floats) -> Floats:
    """Probabilities [S, N] in float64, those of the largest being 1."""
    with np.errstate(invalid="ignore"):
        return np.exp(values.astype(np.float64) - maxima.max(-1, keepdims=True))


def threshold(x: torch.Tensor, maxima: Floats, cuts: Cuts) -> Floats:
    """The least of ``x`` [S, V] that stays, [S]; ``maxima`` are those of its blocks. Equal ones stay or go
    together."""
    with np.errstate(divide="ignore", invalid="ignore"):
        floor = maxima.max(-1) + np.log(cuts.min_p)
    ranked = ((cuts.top_k > 0) & (cuts.top_k < x.shape[1])) | (cuts.top_p < 1)
    if ranked.all():
        return _ranked_threshold(x, maxima, floor, cuts)
    rows = np.flatnonzero(ranked)
    if len(rows):
        some = x[torch.from_numpy(rows).to(x.device)]
        floor[rows] = _ranked_threshold(some, maxima[rows], floor[rows], cuts.of(rows))
    return floor


def _ranked_threshold(x: torch.Tensor, maxima: Floats, floor: Floats, cuts: Cuts) -> Floats:
    """As ``threshold`` for rows with top-k or top-p: look at the best few, and at more until they suffice."""
    endless = cuts.top_k == 0
    top_k = np.where(endless, x.shape[1], cuts.top_k).clip(max=x.shape[1])
    mass = _mass(x, maxima, floor) if endless.any() else np.zeros(len(x))
    look = min(int(top_k.max()), FIRST_LOOK)
    while True:
        bound = np.maximum(nth_bound(x, maxima, look), floor)
        best = _sorted(x if look >= x.shape[1] else at_least(x, bound)[0])
        allowed = (np.arange(best.shape[1]) < top_k[:, None]) & (best >= floor[:, None]) & (best > -np.inf)
        share = np.where(allowed, _weights(best, maxima), 0)
        cumulated = share.cumsum(-1)
        wanted = cuts.top_p * np.where(endless, mass, cumulated[:, -1])
        enough = (top_k <= look) | (bound <= floor) | (endless & (cumulated[:, -1] >= wanted))
        if look >= x.shape[1] or enough.all():
            break
        look *= WIDER
    inside = (cumulated - share < wanted[:, None]) & allowed
    return best[np.arange(len(best)), inside.sum(-1).clip(min=1) - 1]


def _sorted(values: Floats | torch.Tensor) -> Floats:
    """Largest first. Numpy sorts the numbers of a row, without their places, as vectors."""
    return np.sort(host(values) if isinstance(values, torch.Tensor) else values, axis=-1)[:, ::-1]


def _mass(x: torch.Tensor, maxima: Floats, floor: Floats) -> Floats:
    """The weights of all that is not below ``floor``, added up: float64 [S]."""
    peak = torch.from_numpy(maxima.max(-1, keepdims=True)).to(x.device)
    weights = (x - peak).exp_()
    if (floor > -np.inf).any():
        weights = weights.where(x >= torch.from_numpy(floor).to(x.device)[:, None], 0)
    return block_sums(weights).sum(-1)
