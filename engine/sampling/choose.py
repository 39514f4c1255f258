"""Which form of the sampler a device gets, and why. (``mmserve doctor`` shows the same.)"""

import logging

import torch

from mmserve.engine.sampling.batch import BLOCK_BYTES
from mmserve.engine.sampling.sampler import Sampler
from mmserve.models.ops.triton import runtime

log = logging.getLogger(__name__)


def choose_sampling(device: torch.device) -> tuple[str, str]:
    """(triton or torch, why): "triton" edits and draws on the device without waiting for it."""
    if device.type == "cpu":
        return "torch", "torch goes over the logits, numpy over the best few, which is fastest on a CPU"
    reason = runtime.unusable(device)
    if reason is None:
        return "triton", "fused kernels edit and draw on the device, and nobody waits for them"
    return "torch", f"the best few of each row are read by the host; fused kernels cannot run: {reason}"


def bytes_at_most(form: str, vocab: int, rows: int) -> int:
    """What the sampler may come to hold on the device for ``rows`` requests that run at once: for whoever
    shares memory out."""
    if form == "torch":
        return BLOCK_BYTES["cuda"]
    from mmserve.engine.sampling import remembered  # Triton is there, then

    return remembered.bytes_at_most(vocab, rows)


def sampler_for(device: torch.device, vocab: int, dtype: torch.dtype) -> Sampler:
    """The sampler of an engine on ``device`` for logits of ``vocab`` tokens in ``dtype``, ready to draw."""
    form, why = choose_sampling(device)
    log.info("sampling runs as %s: %s", form, why)
    sampler = Sampler(form)
    sampler.prepare(vocab, device, dtype)
    return sampler
