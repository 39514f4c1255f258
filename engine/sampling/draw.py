"""Drawing a token from each row: temperature, then min-p, top-k and top-p, in vLLM's order."""

from dataclasses import dataclass

import torch

FIRST_LOOK = 128  # candidates that usually hold the nucleus; sorting 150,000 would take 8 ms a row


@dataclass(frozen=True, slots=True)
class Cuts:
    """What is cut off each row before the draw. All [S]: ``top_k`` int64 (0 is off), the others float32."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def draw(logits: torch.Tensor, cuts: Cuts, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [S] of float32 logits [S, vocab]: the distribution inverted at ``uniform`` float64 [S].

    Each row's result depends on that row alone.
    """
    probs = (logits / cuts.temperature[:, None]).softmax(-1)
    kept = probs.where(probs >= threshold(probs, cuts)[:, None], 0)
    cumulated = kept.cumsum(-1, dtype=torch.float64)
    # the first token that takes the sum beyond the target has a share of its own, so it was kept
    total = cumulated[:, -1:].contiguous()
    found = torch.searchsorted(cumulated, uniform[:, None] * total, right=True)
    return found.minimum(torch.searchsorted(cumulated, total))[:, 0].clamp(max=logits.shape[1] - 1)


def threshold(probs: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The least probability that stays, [S]. Equal ones stay or go together."""
    floor = cuts.min_p * probs.amax(-1)
    cut = ((cuts.top_k > 0) & (cuts.top_k < probs.shape[1])) | (cuts.top_p < 1)
    if cut.any():
        rows = cut.nonzero()[:, 0]
        floor[rows] = _ranked_threshold(probs[rows], floor[rows], cuts.top_k[rows], cuts.top_p[rows])
    return floor


def _ranked_threshold(
    probs: torch.Tensor, floor: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """As ``threshold`` for rows with top-k or top-p: look at the best few, and at more until they suffice."""
    vocab = probs.shape[1]
    top_k = top_k.where(top_k > 0, vocab).clamp(max=vocab)
    mass = probs.where(probs >= floor[:, None], 0).sum(-1, dtype=torch.float64)
    look = min(FIRST_LOOK, vocab)
    while True:
        best = probs.topk(look).values
        ranks = torch.arange(1, look + 1, device=probs.device)
        allowed = best.where((best >= floor[:, None]) & (ranks <= top_k[:, None]), 0)
        cumulated = allowed.cumsum(-1, dtype=torch.float64)
        complete = (top_k <= look) | (allowed[:, -1] < floor)
        wanted = top_p * torch.where(complete, cumulated[:, -1], mass)
        if look == vocab or bool((complete | (cumulated[:, -1] >= wanted)).all()):
            break
        look = min(look * 8, vocab)
    inside = (cumulated - allowed < wanted[:, None]) & (allowed > 0)
    inside[:, 0] = True
    return best.gather(1, inside.sum(-1, keepdim=True) - 1)[:, 0]
