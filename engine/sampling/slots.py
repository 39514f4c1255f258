"""What each request asks of the sampler, read once when it first comes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmserve.engine.scheduler.request import Request

COLDEST = 1e-4  # as good as greedy; a smaller temperature would take the logits beyond float32
LARGEST_K = 2**31 - 1

# What must be done for a request; none of it for a plain greedy one.
DRAWN, CUT, PENALISED, BIASED, HELD, BARRED, ALLOWED, STEERED, REPORTED = (1 << i for i in range(9))
EDITED = PENALISED | BIASED | HELD | BARRED | ALLOWED | STEERED

# ``step`` is the number of tokens generated so far, ``may_end`` the number from which a stop token may come.
RECORD = np.dtype(
    [
        ("kind", np.int64),
        ("step", np.int64),
        ("may_end", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("logprobs", np.int64),
    ]
)


class Slots(dict[Request, int]):
    """The number of each request's record in ``records``: looked up, and made where it is not there yet."""

    def __init__(self) -> None:
        super().__init__()
        self.records = np.zeros(16, RECORD)
        self._free = list(range(16))

    def __missing__(self, request: Request) -> int:
        if not self._free:
            size = len(self.records)
            self._free += range(size, 2 * size)
            self.records = np.concatenate((self.records, np.zeros(size, RECORD)))
        slot = self[request] = self._free.pop()
        self.records[slot] = record_of(request)
        return slot

    def of(self, requests: Sequence[Request]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(self.__getitem__, requests), np.int64, len(requests))

    def free(self, request: Request) -> None:
        if request in self:
            self._free.append(self.pop(request))


def record_of(request: Request) -> tuple[float, ...]:
    """One record."""
    p = request.prepared.sampling
    return (
        kind_of(request),
        request.num_generated,
        p.min_tokens,
        request.seed & 0xFFFFFFFFFFFFFFFF,
        max(p.temperature, COLDEST),
        min(p.top_k, LARGEST_K),
        p.top_p,
        p.min_p,
        p.repetition_penalty,
        p.frequency_penalty,
        p.presence_penalty,
        -1 if p.logprobs is None else p.logprobs,
    )


def kind_of(request: Request) -> int:
    """Which of ``DRAWN`` ... ``REPORTED`` it needs; ``HELD`` only until ``may_end``."""
    p = request.prepared.sampling
    drawn = p.temperature > 0
    wanted = {
        DRAWN: drawn,
        CUT: drawn and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0),
        PENALISED: p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0,
        BIASED: bool(p.logit_bias),
        HELD: p.min_tokens > request.num_generated and bool(request.stop_ids),
        BARRED: bool(request.prepared.bad_words),
        ALLOWED: bool(p.allowed_token_ids),
        STEERED: request.steering is not None,
        REPORTED: p.logprobs is not None,
    }
    return sum(flag for flag, needed in wanted.items() if needed)
