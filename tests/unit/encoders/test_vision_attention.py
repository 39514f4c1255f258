"""Attention over segments: each kernel against a plain softmax, segment by segment."""

import pytest
import torch

from mmserve.encoders import attention
from mmserve.encoders.attention import Run, attend, runs
from mmserve.encoders.parts import Resumable


def plain(q, k, v, lengths):
    parts = []
    for a, b, c in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) * q.shape[-1] ** -0.5
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    return torch.cat(parts).flatten(1)


def test_neighbours_of_equal_length_form_one_run():
    assert runs([4, 4, 2, 4]) == (Run(0, 4, 2), Run(8, 2, 1), Run(10, 4, 1))
    assert runs([]) == ()


@pytest.mark.parametrize("lengths", [[7], [16] * 40, [300, 300, 12], [513], [64, 64, 256, 4, 4, 4]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attend_equals_plain_softmax(lengths, dtype, tolerance):
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 9, 20).to(dtype)
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


def test_a_part_of_a_huge_segment_is_bounded(monkeypatch):
    """One query block of one head is the most that is computed at once, however many segments there are."""
    monkeypatch.setattr(attention, "SCORE_BLOCK", 300 * 64)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 64)
    q, k, v = torch.randn(3, 600, 2, 8)
    work = list(attend(q, k, v, runs([300, 300])))
    assert len(work) == 2 * 2 * 5
    assert max(work) == 64 * 300 * (4 * 8 + attention.SOFTMAX_WORK)
