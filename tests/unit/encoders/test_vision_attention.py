"""Attention over segments: each kernel against a plain softmax, segment by segment."""

import pytest
import torch

from mmserve.encoders import attention
from mmserve.encoders.attention import Run, attend, runs


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
    found = attend(q, k, v, runs(lengths))
    torch.testing.assert_close(found.double(), plain(q, k, v, lengths), rtol=0, atol=tolerance)


def test_blocked_kernel_is_exact_in_float32():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 300, 20)
    out = torch.empty_like(q)
    attention._blocked(q, k, v, out)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)
