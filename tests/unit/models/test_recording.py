"""A recorded forward does again what it did, with what stands in its buffers now."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmserve.models.ops.native import library
from mmserve.models.ops.native.int8 import NativeInt8Linear
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.linear import NativeLinear
from mmserve.models.ops.native.ops import native_ops
from mmserve.models.ops.native.recording import ALIGNMENT, NotRecordable, Recording, _packed

WIDTH, VOCABULARY = 64, 96


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        library.load("replay")
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


class Net:
    """Kernels with torch's operations between them, over ids that stand in a buffer."""

    def __init__(self, rows=3, layers=4):
        torch.manual_seed(0)
        self.ops, self.linear = native_ops(), NativeLinear()
        self.table = torch.randn(VOCABULARY, WIDTH).bfloat16()
        self.norm = torch.rand(WIDTH).bfloat16()
        shapes = [(2 * WIDTH, WIDTH), (WIDTH, WIDTH)]
        self.layers = [
            [self.linear.pack((torch.randn(*s) / 8).bfloat16()) for s in shapes] for _ in range(layers)
        ]
        self.ids = torch.zeros(rows, dtype=torch.int64)
        self.scale = torch.ones(1)
        self.out = None

    def forward(self):
        """What ``ids`` and ``scale`` make; both are read anew each time."""
        residual = self.table[self.ids]
        hidden = self.ops.rms_norm(residual, self.norm, 1e-6)
        for wide, narrow in self.layers:
            gated = self.ops.silu_and_mul(self.linear(hidden, wide, None))
            first, second = self.linear(gated, narrow, None).split(WIDTH // 2, dim=-1)
            first.add_(1)
            hidden = torch.cat((second, first), dim=-1).mul_(self.scale)
            hidden, residual = self.ops.add_rms_norm(hidden, residual, self.norm, 1e-6)
        self.out = hidden.view(1, *hidden.shape)

    def plainly(self, ids, scale):
        self.ids.copy_(torch.tensor(ids))
        self.scale.fill_(scale)
        kept = self.out
        self.forward()
        result, self.out = self.out, kept
        return result.clone()


@torch.inference_mode()
def test_what_is_replayed_is_what_the_forward_would_do_with_its_buffers_of_now():
    net = Net()
    recording = Recording(net.forward)
    for ids, scale in (([1, 2, 3], 1.0), ([95, 0, 7], 0.5), ([4, 4, 4], -2.0), ([1, 2, 3], 1.0)):
        wanted = net.plainly(ids, scale)
        recording.replay()
        assert torch.equal(net.out, wanted)
    assert recording.kernels == 1 + 4 * len(net.layers)
    assert recording.operations > len(net.layers)


@torch.inference_mode()
def test_memory_of_a_recording_is_its_own():
    """What others ask for afterwards is never part of it, though the forward has let go of nearly all."""
    net = Net()
    recording = Recording(net.forward)
    wanted = net.plainly([5, 6, 7], 3.0)
    others = [torch.full((n,), 7, dtype=torch.uint8) for n in range(16, 4096, 16) for _ in range(4)]
    recording.replay()
    assert torch.equal(net.out, wanted)
    assert all((other == 7).all() for other in others)


@torch.inference_mode()
def test_layers_share_their_memory():
    sizes = [Recording(Net(layers=layers).forward).memory.numel() for layers in (4, 8)]
    assert sizes[0] == sizes[1]
    assert sizes[0] < 4 * 3 * 4 * WIDTH * 2


@torch.inference_mode()
def test_a_number_that_is_read_out_of_a_tensor_cannot_be_recorded():
    net = Net()

    def reads():
        net.forward()
        return int(net.ids[0])

    with pytest.raises(NotRecordable, match="reads a number"):
        Recording(reads)
    Recording(net.forward).replay()  # and nothing of it is left


@torch.inference_mode()
def test_a_forward_that_fails_leaves_no_recording_under_way():
    with pytest.raises(ZeroDivisionError):
        Recording(lambda: 1 / 0)
    Recording(Net().forward).replay()


@torch.inference_mode()
def test_a_recording_within_another_is_refused():
    net = Net()
    with pytest.raises(NotRecordable, match="another"):
        Recording(lambda: Recording(net.forward))


def test_kernels_of_other_threads_are_not_noted():
    net, other = Net(), Net()

    def beside():
        with torch.inference_mode():
            other.forward()

    def forward():
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        net.forward()

    with torch.inference_mode():
        assert Recording(forward).kernels == Recording(net.forward).kernels


@torch.inference_mode()
def test_a_kernel_that_cannot_is_told_by_its_name():
    linear = NativeInt8Linear()
    weight = linear.pack(torch.randn(VOCABULARY, WIDTH))
    ids = torch.tensor([1, 2])
    found = []
    recording = Recording(lambda: found.append(linear.rows(weight, ids, torch.float32)))
    ids.copy_(torch.tensor([3, VOCABULARY - 1]))
    recording.replay()
    assert torch.equal(found[0], linear.rows(weight, ids, torch.float32))
    ids[1] = VOCABULARY
    with pytest.raises(RuntimeError, match="int8_rows"):
        recording.replay()


blocks = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(1, 500)), max_size=25)


@given(blocks)
def test_no_two_that_are_used_at_the_same_time_overlap(blocks):
    used = {i: (first, first + more) for i, (first, more, _) in enumerate(blocks)}
    sizes = {i: size for i, (_, _, size) in enumerate(blocks)}
    offsets, total = _packed(used, sizes)
    for a in used:
        assert offsets[a] % ALIGNMENT == 0
        assert offsets[a] + sizes[a] <= total
        for b in used:
            together = used[a][0] <= used[b][1] and used[b][0] <= used[a][1]
            if a < b and together:
                assert offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
