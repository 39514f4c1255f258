"""What a request's own tokens and wishes do to its logits before a token is chosen."""

from collections.abc import Sequence

import torch

from mmserve.engine.scheduler.request import Request


class TokenCounts:
    """How often each token was generated, and which ones stand in the prompt or the answer; [vocab] each."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.generated = torch.zeros(vocab, dtype=torch.float32, device=device)
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.counted = 0

    def update(self, request: Request) -> None:
        """Count the tokens that came since the last call."""
        new = torch.from_numpy(request.token_ids[self.counted : request.num_tokens]).long()
        new = new.to(self.seen.device)
        self.seen[new] = True
        answer = new[max(request.prompt_len - self.counted, 0) :]
        self.generated.index_add_(0, answer, torch.ones_like(answer, dtype=torch.float32))
        self.counted = request.num_tokens


class LogitEdits:
    """Repetition, frequency and presence penalties, logit bias, and no end before ``min_tokens``."""

    def __init__(self) -> None:
        self._counts: dict[str, TokenCounts] = {}

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Edit float32 ``logits`` [R, vocab] in place, one row a request."""
        penalised = [i for i, r in enumerate(requests) if has_penalties(r)]
        if penalised:
            logits[penalised] = self._penalised(logits[penalised], [requests[i] for i in penalised])
        for row, request in zip(logits, requests, strict=True):
            _bias(row, request)

    def forget(self, request: Request) -> None:
        self._counts.pop(request.request_id, None)

    def _penalised(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """Formulas: CTRL (arXiv:1909.05858) for repetition; OpenAI's reference for the other two."""
        counts = [self._current(r, logits) for r in requests]
        generated, seen = torch.stack([c.generated for c in counts]), torch.stack([c.seen for c in counts])
        params = [r.prepared.sampling for r in requests]
        repetition, frequency, presence = (
            logits.new_tensor(values)[:, None]
            for values in zip(
                *((p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params),
                strict=True,
            )
        )
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(seen, repeated, logits) - frequency * generated - presence * (generated > 0)

    def _current(self, request: Request, logits: torch.Tensor) -> TokenCounts:
        counts = self._counts.get(request.request_id)
        if counts is None:
            counts = self._counts[request.request_id] = TokenCounts(logits.shape[1], logits.device)
        counts.update(request)
        return counts


def has_penalties(request: Request) -> bool:
    p = request.prepared.sampling
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0


def edits_logits(request: Request) -> bool:
    """Whether ``LogitEdits.apply`` would change the request's next row."""
    p = request.prepared.sampling
    return has_penalties(request) or bool(p.logit_bias) or not request.may_end


def _bias(row: torch.Tensor, request: Request) -> None:
    p = request.prepared.sampling
    if p.logit_bias:
        tokens = torch.tensor(list(p.logit_bias), device=row.device)
        row.index_add_(0, tokens, row.new_tensor(list(p.logit_bias.values())))
    if not request.may_end:
        row[list(request.stop_ids)] = -torch.inf
