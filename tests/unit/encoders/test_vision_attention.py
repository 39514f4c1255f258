"""Attention over segments: each kernel against a plain softmax, segment by segment."""

import numpy as np
import pytest
import torch

from mmserve.encoders import attention
from mmserve.encoders.attention import attend
from mmserve.encoders.parts import Resumable
from mmserve.encoders.segments import Run, Tiles, runs
from mmserve.models.ops.native import attention as native
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.triton import runtime as triton


def plain(q, k, v, lengths):
    parts = []
    for a, b, c in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) * q.shape[-1] ** -0.5
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    return torch.cat(parts).flatten(1)


def test_neighbours_of_equal_length_form_one_run():
    assert runs([4, 4, 2, 4]) == (Run(0, 4, 2), Run(8, 2, 1), Run(10, 4, 1))
    assert runs([]) == ()


@pytest.fixture(params=["native", "products", "fused"])
def form(request, monkeypatch):
    """Each form of attention, whatever this CPU would choose."""
    if request.param == "native" and (reason := native.unusable(torch.device("cpu"), torch.bfloat16)):
        pytest.skip(reason)
    monkeypatch.setattr(attention, "choose_form", lambda *_: (request.param, "chosen by the test"))
    return request.param


@pytest.mark.parametrize("lengths", [[7], [16] * 40, [300, 300, 12], [513], [64, 64, 256, 4, 4, 4]])
@pytest.mark.parametrize("dim", [20, 64, 72, 80])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attend_equals_plain_softmax(form, lengths, dim, dtype, tolerance):
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 9, dim).to(dtype)
    q, k, v = qkv[:, :3], qkv[:, 3:6], qkv[:, 6:]
    found = Resumable(attend(q, k, v, runs(lengths))).finish()
    torch.testing.assert_close(found.double(), plain(q, k, v, lengths), rtol=0, atol=tolerance)


@pytest.fixture
def triton_form(monkeypatch):
    if reason := triton.unusable(torch.device("cpu")):
        pytest.skip(reason)
    monkeypatch.setattr(attention, "choose_form", lambda *_: ("triton", "chosen by the test"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_plain_softmax(triton_form, dtype):
    lengths = [64] * 2 + [130, 4]
    q, k, v = torch.randn(sum(lengths), 6, 48).to(dtype).chunk(3, 1)
    found = Resumable(attend(q, k, v, runs(lengths))).finish()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), plain(q, k, v, lengths), rtol=0, atol=limit)


def test_rows_in_no_segment_are_zero_to_triton_and_never_read(triton_form):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 50, 1, 32)
    for x in (q, k, v):
        x[40:] = float("nan")
    found = Resumable(attend(q, k, v, runs([24, 16]))).finish()
    wanted = plain(q[:40], k[:40], v[:40], [24, 16])
    torch.testing.assert_close(found[:40].double(), wanted, rtol=0, atol=1e-5)
    assert not found[40:].any()


def test_tiles_that_stay_are_filled_anew(triton_form):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 60, 2, 32)
    tiles = Tiles(4, 40, q.device, q.dtype)
    table = tiles.table.data_ptr()
    for lengths in ([40, 20], [20, 20, 20], [60]):
        tiles.fill(runs(lengths))
        assert tiles.table.data_ptr() == table
        found = Resumable(attend(q, k, v, tiles)).finish()
        torch.testing.assert_close(found.double(), plain(q, k, v, lengths), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="5 tiles; there is room for 4"):
        tiles.fill(runs([12] * 5))


def test_products_are_exact_in_float32():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 300, 20)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention._products(q, k, v), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (40, 12)])
@pytest.mark.parametrize("together", [1, 2, 5, 24, 1000])
def test_groups_hold_each_head_of_each_segment_once(shape, together):
    seen = torch.zeros(shape, dtype=torch.int64)
    for some in attention._groups(*shape, together):
        seen[some] += 1
        assert seen[some].numel() <= together
    assert (seen == 1).all()


def test_a_part_of_a_huge_segment_is_bounded(form, monkeypatch):
    """One query block of one head is the most that is computed at once, however many segments there are."""
    monkeypatch.setattr(attention, "SCORE_BLOCK", 300 * 64)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 64)
    q, k, v = torch.randn(3, 600, 2, 8)
    work = list(attend(q, k, v, runs([300, 300])))
    assert len(work) == 2 * 2 * 5
    assert max(work) == 64 * 300 * (4 * 8 + attention.SOFTMAX_WORK)


def test_native_queries_are_the_same_in_any_block_of_queries():
    if reason := native.unusable(torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 700, 2, 72)
    keys, whole, parts = np.array([100]), torch.zeros(700, 2, 72), torch.zeros(700, 2, 72)
    native.attend_segments(q, k, v, whole, keys, 500, keys, 500)
    for start, count in ((100, 1), (101, 250), (351, 249)):
        native.attend_segments(q, k, v, parts, np.array([start]), count, keys, 500)
    assert torch.equal(whole, parts)


def test_the_form_goes_by_what_the_cpu_can_do(monkeypatch):
    cpu, chosen = torch.device("cpu"), attention.choose_form.__wrapped__

    def unavailable():
        raise NativeUnavailable("there is no compiler")

    monkeypatch.setattr(native, "kernels", lambda: None)
    monkeypatch.setattr(native, "bf16_instructions", lambda: None)
    assert chosen(cpu, torch.bfloat16)[0] == "native"
    monkeypatch.setattr(native, "bf16_instructions", lambda: "amx_bf16")
    assert chosen(cpu, torch.bfloat16)[0] == "products"
    assert chosen(cpu, torch.float32)[0] == "native"
    monkeypatch.setattr(native, "kernels", unavailable)
    form, why = chosen(cpu, torch.float32)
    assert form == "fused"
    assert "there is no compiler" in why


def test_on_a_gpu_the_form_is_flashinfer_then_triton_then_torchs_own(monkeypatch):
    reasons = {"flashinfer": None, "triton": None}
    monkeypatch.setattr(attention.flashinfer, "unusable", lambda *_: reasons["flashinfer"])
    monkeypatch.setattr(attention.triton, "unusable", lambda *_: reasons["triton"])
    here = torch.device("cuda"), torch.bfloat16, 72
    chosen = attention.choose_form.__wrapped__
    assert chosen(*here)[0] == "flashinfer"
    reasons["flashinfer"] = "no heads of 72"
    form, why = chosen(*here)
    assert form == "triton"
    assert "no heads of 72" in why
    reasons["triton"] = "the GPU is too old"
    form, why = chosen(*here)
    assert form == "fused"
    assert "too old" in why


def test_flashinfer_attends_within_all_segments_in_one_call(monkeypatch):
    """Told by a stand-in for its attention, which wants every row to be in a segment."""
    asked = []

    def ragged(q, k, v, lengths):
        asked.append(lengths)
        return plain(q, k, v, list(lengths)).view(q.shape).to(q.dtype)

    monkeypatch.setattr(attention, "choose_form", lambda *_: ("flashinfer", "chosen by the test"))
    monkeypatch.setattr(attention, "_ragged_on", lambda device: ragged)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 30, 2, 16)
    for rows in (30, 24):
        lengths = [8, 8, rows - 16]
        found = Resumable(attend(q, k, v, runs(lengths))).finish()
        wanted = plain(*(x[:rows] for x in (q, k, v)), lengths)
        torch.testing.assert_close(found[:rows].double(), wanted, rtol=0, atol=1e-5)
        assert not found[rows:].any()
    assert asked == [(8, 8, 14), (8, 8, 8)]
