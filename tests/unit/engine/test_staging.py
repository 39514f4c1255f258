"""Arrays between host and device: nobody waits who need not, and nothing is touched that is still copied."""

import numpy as np
import pytest
import torch
from helpers.late_device import LateDevice

from mmserve.engine.runner.devices import CPUDevice
from mmserve.engine.runner.staging import Fetches, Staging


def test_an_array_may_be_changed_when_it_was_handed_over():
    device = LateDevice()
    staging, target, values = Staging(device), torch.zeros(3, dtype=torch.int64), np.array([1, 2, 3])
    with staging.turn() as fill:
        fill(target, values)
        values[:] = 9
    assert target.tolist() == [0, 0, 0], "the host did not wait"
    device.here.run()
    assert target.tolist() == [1, 2, 3]


@pytest.mark.parametrize("turns", [2, 3, 7])
def test_what_was_staged_is_not_written_over_before_it_was_copied(turns):
    device = LateDevice()
    staging = Staging(device, 64)
    targets = [torch.zeros(8, dtype=torch.int32) for _ in range(turns)]
    for number, target in enumerate(targets):
        with staging.turn() as fill:
            fill(target, np.full(8, number + 1))
    device.here.run()
    assert [t.unique().tolist() for t in targets] == [[n + 1] for n in range(turns)]


def test_the_host_waits_for_the_turn_before_the_last_and_for_no_later_one():
    device = LateDevice()
    staging, targets = Staging(device), [torch.zeros(1) for _ in range(3)]
    for target in targets:
        with staging.turn() as fill:
            fill(target, np.array([5.0]))
    assert [t.item() for t in targets] == [5.0, 0.0, 0.0]


def test_a_turn_takes_more_than_there_was_room_for():
    device = LateDevice()
    staging = Staging(device, 64)
    targets = [torch.zeros(100 * n, dtype=torch.int64) for n in range(1, 5)]
    for _ in range(3):
        with staging.turn() as fill:
            for target in targets:
                fill(target, np.arange(len(target), dtype=np.int32))
    device.here.run()
    assert all(torch.equal(t, torch.arange(len(t))) for t in targets)


def test_shapes_and_dtypes_are_the_targets():
    device = LateDevice()
    buffer = torch.zeros(3, 8, dtype=torch.int32)
    with Staging(device).turn() as fill:
        fill(buffer[:, :2], np.array([[1, 2], [3, 4], [5, 6]], np.int64))
    device.here.run()
    assert buffer[:, :3].tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 0]]


def test_a_cpu_copies_at_once():
    target = torch.zeros(2)
    with Staging(CPUDevice()).turn() as fill:
        fill(target, np.array([1.0, 2.0]))
        assert target.tolist() == [1.0, 2.0]


def test_results_are_read_when_their_copy_has_happened():
    device = LateDevice()
    fetches = Fetches(device)
    ids = torch.tensor([4, 5, 6])
    fetched = fetches.start([ids, ids.float()])
    assert device.here.done == 0
    first, second = fetched.wait()
    assert (first.tolist(), second.tolist()) == ([4, 5, 6], [4.0, 5.0, 6.0])


def test_a_buffer_is_used_again_when_its_copy_was_waited_for():
    device = LateDevice()
    fetches = Fetches(device)
    flights = [fetches.start([torch.tensor([n])]) for n in range(2)]
    assert [f.wait()[0].tolist() for f in flights] == [[0], [1]]
    assert len(fetches.free) == 2
    later = fetches.start([torch.tensor([7])])
    assert len(fetches.free) == 1
    assert later.wait()[0].tolist() == [7]


def test_arrays_that_were_read_stay_as_they_are():
    device = LateDevice()
    fetches = Fetches(device)
    first = fetches.start([torch.tensor([1])]).wait()[0]
    fetches.start([torch.tensor([2])]).wait()
    assert first.tolist() == [1]


def test_nothing_to_copy_is_still_waited_for():
    device = LateDevice()
    happened = []
    device.here.enqueue(lambda: happened.append(True))
    assert Fetches(device).start(()).wait() == []
    assert happened == [True]
