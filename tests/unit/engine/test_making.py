"""What an engine is made of follows from the device and what was asked for."""

from types import SimpleNamespace

import pytest
import torch

from mmserve.core.config import NO_BOUND, Config
from mmserve.engine.making import STALL_FACTOR, encoder_tokens, stall_factor

ON_CPU, ON_GPU = (SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("model", "streamed", "whole"),
    [(ON_CPU, STALL_FACTOR["cpu"], NO_BOUND), (ON_GPU, None, None)],
    ids=["cpu", "cuda"],
)
def test_waits_are_bounded_on_a_cpu_where_answers_are_read_as_they_come(model, streamed, whole):
    assert stall_factor(model, Config()) == streamed
    assert stall_factor(model, Config().for_whole_answers()) == whole
    assert stall_factor(model, Config.of(stall_factor=3.0)) == 3.0


def test_a_gpu_encodes_larger_batches():
    assert encoder_tokens(ON_GPU, Config()) > encoder_tokens(ON_CPU, Config())
    assert encoder_tokens(ON_GPU, Config.of(encoder_tokens=7)) == 7
