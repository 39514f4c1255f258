"""The sampler: greedy rows by argmax, the others by one draw each, log-probabilities where wanted."""

from collections.abc import Sequence

import torch

from mmserve.core.messages import TokenLogprob
from mmserve.engine.grammar.mask import steer
from mmserve.engine.sampling.draw import Cuts, draw
from mmserve.engine.sampling.noise import uniforms
from mmserve.engine.sampling.penalties import LogitEdits, edits_logits
from mmserve.engine.scheduler.request import Request

Sampled = tuple[int, TokenLogprob | None]

COLDEST = 1e-4  # as good as greedy; a smaller temperature would take the logits beyond float32


class Sampler:
    """Chooses the next token of each request from its logits.

    Log-probabilities are those of the model itself, before penalties, bias, temperature and cuts, as
    OpenAI and vLLM report them.
    """

    def __init__(self) -> None:
        self._edits = LogitEdits()

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[Sampled]:
        """One (token, log-probability if asked for) for each row of ``logits`` [R, vocab] of any dtype."""
        if all(_plain(r) for r in requests):
            return [(token, None) for token in logits.argmax(-1).tolist()]
        raw = logits.float()
        edited = self._edited(raw, requests)
        tokens = edited.argmax(-1)
        drawn = [i for i, r in enumerate(requests) if r.prepared.sampling.temperature > 0]
        if drawn:
            tokens[drawn] = _drawn(edited[drawn], [requests[i] for i in drawn])
        return list(zip(tokens.tolist(), _logprobs(raw, tokens, requests), strict=True))

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended."""
        self._edits.forget(request)

    def _edited(self, raw: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        if not any(edits_logits(r) or r.steering for r in requests):
            return raw
        edited = raw.clone()
        self._edits.apply(edited, requests)
        steer(edited, [r.steering for r in requests])
        return edited


def _plain(request: Request) -> bool:
    sampling = request.prepared.sampling
    edited = edits_logits(request) or request.steering is not None
    return sampling.temperature == 0 and sampling.logprobs is None and not edited


def _drawn(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    params = [r.prepared.sampling for r in requests]
    cuts = Cuts(
        temperature=logits.new_tensor([max(p.temperature, COLDEST) for p in params]),
        top_k=torch.tensor([min(p.top_k, logits.shape[1]) for p in params], device=logits.device),
        top_p=logits.new_tensor([p.top_p for p in params]),
        min_p=logits.new_tensor([p.min_p for p in params]),
    )
    noise = uniforms([r.seed for r in requests], [r.num_generated for r in requests])
    return draw(logits, cuts, torch.from_numpy(noise).to(logits.device))


def _logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]
) -> list[TokenLogprob | None]:
    counts = [r.prepared.sampling.logprobs for r in requests]
    rows = [i for i, count in enumerate(counts) if count is not None]
    found: list[TokenLogprob | None] = [None] * len(counts)
    if not rows:
        return found
    logprobs = raw[rows].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[rows, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(max(counts[i] or 0 for i in rows), raw.shape[1]))
    for i, token, logprob, best, best_ids in zip(
        rows, tokens[rows].tolist(), chosen, values.tolist(), ids.tolist(), strict=True
    ):
        top = tuple(zip(best_ids, best, strict=True))[: counts[i] or 0]
        found[i] = TokenLogprob(token, logprob, top)
    return found
