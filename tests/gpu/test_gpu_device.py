"""What the code expects of CUDA itself, through the device protocol."""

import pytest
import torch

from mmserve.core.device import FIRST, LAST
from mmserve.engine.runner.devices import device_for

pytestmark = pytest.mark.gpu


def test_a_captured_graph_reads_its_static_buffers_anew(cuda):
    device = device_for(cuda)
    source, out = torch.zeros(4, device=cuda), torch.empty(4, device=cuda)
    graph = device.capture(lambda: out.copy_(source * 2))
    source.fill_(3)
    graph.replay()
    assert out.tolist() == [6, 6, 6, 6]


def test_a_capture_has_run_once(cuda):
    """Whoever captures a step has its results, as those of a replay."""
    device, ones, out = device_for(cuda), torch.ones(3, device=cuda), torch.zeros(3, device=cuda)
    graph = device.capture(lambda: out.copy_(ones + 1))
    assert out.tolist() == [2, 2, 2]
    out.zero_()
    graph.replay()
    assert out.tolist() == [2, 2, 2]


def test_copies_to_pinned_memory_are_there_behind_their_event(device):
    place = device_for(device)
    stream, event = place.stream(FIRST), place.event()
    source = torch.arange(1 << 16, device=device)
    target = place.pinned((1 << 16,), torch.int64)
    with stream.use():
        place.copy(target, source)
        event.record(place.current())
    event.synchronize()
    assert event.done()
    assert torch.equal(target, source.cpu())


def test_one_stream_waits_for_another_without_the_host(device):
    place = device_for(device)
    first, second, event = place.stream(FIRST), place.stream(LAST), place.event()
    values = torch.zeros(1 << 20, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    with first.use():
        for _ in range(50):
            values += 1
        event.record(place.current())
    event.wait(second)
    with second.use():
        seen = values.clone()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert (seen == 50).all()
