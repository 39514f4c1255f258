"""Attention over segments: each kernel against a plain softmax, segment by segment."""

import numpy as np
import pytest
import torch

from mmserve.encoders import attention
from mmserve.encoders.attention import Run, attend, runs
from mmserve.encoders.parts import Resumable
from mmserve.models.ops.native import attention as native
from mmserve.models.ops.native.library import NativeUnavailable


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

    assert chosen(torch.device("cuda"), torch.bfloat16)[0] == "fused"
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
