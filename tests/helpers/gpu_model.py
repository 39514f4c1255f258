"""tiny-vl on the device under test, and requests about its samples."""

import numpy as np
import torch
from helpers.equal_models import CHATS, TinyVL

from mmserve.core.config import Config, MediaOptions, ModelOptions
from mmserve.engine.engine import Engine
from mmserve.models.hub import resolve
from mmserve.models.registry import load_model
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec

CLOSE = 2e-3  # log-probabilities in float32 by kernels that add in other orders


class OnDevice(TinyVL):
    """As ``TinyVL``, in float32; clips are left out where PyAV cannot be had."""

    def __init__(self, device):
        self.model = load_model(ModelOptions(dtype="float32", device=device))
        self.processor = Processor(ProcessorSpec.load(resolve("mmserve/tiny-vl")), MediaOptions())
        chats = [chat for chat in CHATS if reads_clips() or not any(".mp4" in part for part in chat)]
        self.requests = [self.request(*chat, name=str(i)) for i, chat in enumerate(chats)]

    def engine(self, **options):
        config = Config.of(**{"kv_cache_mib": 64, "max_running": 16, "page_size": 16, **options})
        return Engine(self.model, config, eos_ids=())


def reads_clips():
    import av

    return hasattr(av, "__version__")


def assert_alike(ours, theirs, close=CLOSE):
    """The same words, by nearly the same log-probabilities, answer by answer."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert np.allclose(one.logprobs, other.logprobs, atol=close)


def on_cuda(device):
    return torch.device(device).type == "cuda"
