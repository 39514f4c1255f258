"""One prompt's log-probabilities as they come. Without torch, since the scheduler's requests carry it."""

import numpy as np
import numpy.typing as npt

from mmserve.core.messages import PromptLogprobs

LOGIT_ROWS = 256  # rows of prompts that a step may ask logits for: 80 MB of bf16 with 150,000 tokens


class PromptScores:
    """Of a prompt of N tokens: token ``i + 1`` is told by the logits of row ``i``, and the first by none.

    0               known                    N - 1
    |-- rows told ----|-- rows to be computed --|

    Chunks come in order; after a preemption they begin anew, and rows that are told are not asked again.
    """

    def __init__(self, prompt: npt.NDArray[np.int32], count: int) -> None:
        rows = len(prompt) - 1
        self.known = 0
        self.count = count
        self.tokens = prompt.copy()
        self._logprobs = np.empty(rows, np.float32)
        self._ranks = np.empty(rows, np.int32)
        self._top_ids = np.empty((rows, count), np.int32)
        self._top_logprobs = np.empty((rows, count), np.float32)

    @property
    def complete(self) -> bool:
        return self.known == len(self._logprobs)

    def wanted(self, start: int, stop: int) -> range:
        """The rows of [start, stop) that are to be told."""
        return range(max(start, self.known), min(stop, len(self._logprobs)))

    def add(
        self,
        logprobs: npt.NDArray[np.floating],
        ranks: npt.NDArray[np.integer],
        top_ids: npt.NDArray[np.integer],
        top_logprobs: npt.NDArray[np.floating],
    ) -> None:
        """The next rows: [n], [n] and twice [n, up to ``count``] where the vocabulary has fewer."""
        rows = slice(self.known, self.known + len(logprobs))
        self._logprobs[rows], self._ranks[rows] = logprobs, ranks
        self._top_ids[rows, : top_ids.shape[1]] = top_ids
        self._top_logprobs[rows, : top_ids.shape[1]] = top_logprobs
        self.known = rows.stop

    def message(self) -> PromptLogprobs:
        assert self.complete, "a prompt that was not computed whole"
        return PromptLogprobs(self.tokens, self._logprobs, self._ranks, self._top_ids, self._top_logprobs)
