"""The largest logit of each row."""

import numpy as np
import numpy.typing as npt
import torch


def greedy(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """Tokens [R] with the largest of ``logits`` [R, vocab], the first of equals, on the host.

    On a CPU numpy's search is 20 times as fast as torch's, and half-precision numbers are compared as the
    integers of their bits: for numbers that are not negative these have the same order.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1).cpu().numpy()
    if logits.dtype not in (torch.bfloat16, torch.float16):
        return logits.numpy().argmax(-1)
    tokens = logits.view(torch.int16).numpy().argmax(-1)
    found = logits.view(torch.int16).numpy()[np.arange(len(tokens)), tokens]
    negative = np.flatnonzero(found < 0)  # these rows have no other numbers, and their order is the reverse
    if len(negative):
        tokens[negative] = logits[torch.from_numpy(negative)].float().numpy().argmax(-1)
    return tokens
