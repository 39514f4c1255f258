"""What a machine with an NVIDIA GPU must show: `make gpu-check`."""

from pathlib import Path

import pytest
import torch

from mmserve import LLM, SamplingParams
from mmserve.engine.runner.devices import CUDADevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=48)


def ask(picture, text):
    return [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}
    ]


def test_captured_graph_reads_its_static_buffers_anew():
    device = CUDADevice(torch.device("cuda"))
    source = torch.zeros(4, device="cuda")
    out = torch.empty(4, device="cuda")
    graph = device.capture(lambda: out.copy_(source * 2))
    source.fill_(3)
    graph.replay()
    assert out.tolist() == [6, 6, 6, 6]


def test_answers_equal_those_of_the_cpu():
    from mmserve.models import tiny

    samples = sorted((Path(tiny.__file__).parent / "samples").glob("*.jpg"))
    chats = [ask(str(path), "Describe this image.") for path in samples]
    with LLM(device="cpu", dtype="float32") as on_cpu, LLM(device="cuda", dtype="float32") as on_gpu:
        assert [a.text for a in on_gpu.chat(chats, GREEDY)] == [a.text for a in on_cpu.chat(chats, GREEDY)]
