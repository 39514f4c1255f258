"""The fused sampler at a whole vocabulary: as the plain one on a CPU, and waited for by nobody.

(The unit tests of the kernels run on the GPU, too, where there is one.)
"""

import pytest
import torch
from helpers.asked import request

from mmserve.engine.sampling.choose import sampler_for
from mmserve.engine.sampling.sampler import Sampler

pytestmark = pytest.mark.gpu
VOCAB = 151_936
WISHES = [
    {},
    {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 1000},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"presence_penalty": 0.5, "top_p": 0.9, "bad": ((1, 2), (3,))},
    {"temperature": 0.0, "logit_bias": {5: 100.0}, "logprobs": 4},
]


def batch():
    return [request(str(i), seed=i, **wish) for i, wish in enumerate(WISHES)]


def rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(len(WISHES), VOCAB, generator=generator) * 3).bfloat16()


def test_the_same_seeds_give_the_same_tokens_as_on_a_cpu(device):
    fused, plain, asked, twins = Sampler("triton"), Sampler(), batch(), batch()
    for step in range(10 if device.type == "cuda" else 1):
        found = [token for token, _ in fused.sample(rows(step).to(device), asked)]
        wanted = [token for token, _ in plain.sample(rows(step), twins)]
        assert found == wanted, step
        for one, twin, token in zip(asked, twins, wanted, strict=True):
            one.append(token)
            twin.append(token)


def test_the_plain_form_runs_on_a_gpu_too(device):
    found = [token for token, _ in Sampler().sample(rows(0).to(device), batch())]
    assert found == [token for token, _ in Sampler().sample(rows(0), batch())]


def test_the_fused_form_is_chosen(cuda):
    assert sampler_for(cuda, VOCAB, torch.bfloat16).form == "triton"


def test_no_draw_waits_for_the_device(cuda):
    sampler, asked = Sampler("triton"), batch()
    logits = rows(0).to(cuda)
    sampler.draw(logits, asked)  # kernels are compiled, buffers made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = [sampler.draw(logits, asked) for _ in range(5)]
        others = sampler.draw(logits[:4], asked[:4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({tuple(step.ids.tolist()) for step in drawn}) > 1
    assert len(others.ids) == 4
