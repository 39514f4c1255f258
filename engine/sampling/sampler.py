"""The sampler: greedy rows by argmax, the others by one draw each, log-probabilities where wanted."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmserve.engine.sampling.batch import SamplingBatch
from mmserve.engine.sampling.block import Records
from mmserve.engine.sampling.drawn import Drawn, Sampled
from mmserve.engine.sampling.history import History
from mmserve.engine.sampling.slots import HELD, STEERED, Slots
from mmserve.engine.scheduler.request import Request

if TYPE_CHECKING:
    from mmserve.engine.sampling.fused import FusedBatch
    from mmserve.engine.sampling.remembered import Remembered


class Sampler:
    """Chooses the next token of each request from its logits.

    Log-probabilities are those of the model itself, before penalties, bias, temperature and cuts, as
    OpenAI and vLLM report them.

    What a request asks is read when it first comes, and its tokens are counted here: every token that
    ``sample`` returns must be appended to its request before the next call, and no other. As long as the same
    requests come in the same order, a step runs no Python for each of them, but for those with grammars.
    """

    def __init__(self, form: str = "torch") -> None:
        """``form``: see ``choose_sampling``."""
        self.form = form
        self._slots = Slots()
        self._history: History | Remembered | None = None
        self._batch: SamplingBatch | FusedBatch | None = None

    def prepare(self, vocab: int, device: torch.device, dtype: torch.dtype) -> None:
        """Compile what draws from logits of ``vocab`` tokens in ``dtype`` need, where that takes a while."""
        if self.form == "torch":
            return
        from mmserve.engine.sampling.fused import compile_beforehand  # Triton is there, then

        compile_beforehand(self._remembered(vocab, device), dtype)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[Sampled]:
        """One (token, log-probability if asked for) for each row of ``logits`` [R, vocab] of any dtype.

        The token is NO_TOKEN where a request forbids them all; it must end then.
        """
        tokens, logprobs = self._fitting(requests, logits).sample(logits)
        return list(zip(tokens, logprobs, strict=True))

    def draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> Drawn:
        """As ``sample`` for steps in flight: tokens stay on the device where they can, and the requests have
        places for them (``Request.reach``) before the next call, values only where ``needs_words``."""
        return self._fitting(requests, logits).draw(logits)

    def needs_words(self, requests: Sequence[Request]) -> bool:
        """Whether a draw for ``requests`` reads on the host what each said last: forms of answers do, and bad
        words where they are not the kernels' work."""
        plain = self.form == "torch"
        return any(r.steering is not None or (plain and r.prepared.bad_words) for r in requests)

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended."""
        self._settle()
        self._slots.free(request)
        if self._history is not None:
            self._history.forget(request)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """AssertionError unless what is kept is of ``requests``, and their tokens were all counted."""
        self._settle()
        left = set(self._slots) - set(requests)
        assert not left, f"the sampler remembers {len(left)} requests that are gone"
        for request, slot in self._slots.items():
            assert self._slots.records["step"][slot] == request.num_generated, "a token that was not counted"

    def _fitting(self, requests: Sequence[Request], logits: torch.Tensor) -> "SamplingBatch | FusedBatch":
        if self._batch is None or not self._batch.fits(requests):
            self._batch = self._made(requests, logits)
        return self._batch

    def _made(self, requests: Sequence[Request], logits: torch.Tensor) -> "SamplingBatch | FusedBatch":
        self._settle()
        slots = self._slots.of(requests)
        records = self._slots.records
        kind = records["kind"]
        kind[slots[records["step"][slots] >= records["may_end"][slots]]] &= ~HELD
        for i in np.flatnonzero(kind[slots] & STEERED).tolist():
            if requests[i].steering is None:
                kind[slots[i]] &= ~STEERED
        return self._batch_of(requests, records[slots], logits)

    def _batch_of(
        self, requests: Sequence[Request], records: Records, logits: torch.Tensor
    ) -> "SamplingBatch | FusedBatch":
        vocab = logits.shape[1]
        if self.form == "torch":
            if self._history is None:
                self._history = History(logits.device)
            assert isinstance(self._history, History)
            return SamplingBatch(requests, records, self._history, vocab)
        from mmserve.engine.sampling.fused import FusedBatch

        return FusedBatch(requests, records, self._remembered(vocab, logits.device), vocab)

    def _remembered(self, vocab: int, device: torch.device) -> "Remembered":
        from mmserve.engine.sampling.remembered import Remembered

        if self._history is None:
            self._history = Remembered(device, vocab)
        assert isinstance(self._history, Remembered)
        return self._history

    def _settle(self) -> None:
        """Count the tokens of the last steps, and let go of their batch."""
        if self._batch is not None:
            slots = self._slots.of(self._batch.requests)
            self._slots.records["step"][slots] += self._batch.age
            self._batch = None
