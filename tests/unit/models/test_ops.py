"""Every faster form of an operation against the plain torch form."""

import pytest
import torch

from mmserve.core.errors import ConfigError
from mmserve.models.ops import cpu, reference, registry
from mmserve.models.ops.registry import choose_ops, reference_ops

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (5, 3, 32)])
def test_rms_norm_is_bit_for_bit_the_reference(dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    assert torch.equal(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert torch.equal(x, before), "the input is not touched"


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_bit_for_bit_the_reference(dtype):
    x, residual, weight = (
        torch.randn(5, 64).to(dtype),
        torch.randn(5, 64).to(dtype),
        torch.randn(64).to(dtype),
    )
    wanted = reference.add_rms_norm(x, residual, weight, 1e-6)
    found = cpu.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("dtype", "table", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 3e-2),
        (torch.bfloat16, torch.float32, 3e-2),
    ],
)
def test_rope_equals_the_reference(dtype, table, tolerance):
    heads = torch.randn(6, 5, 32).to(dtype)
    before = heads.clone()
    x, (cos, sin) = heads[:, :3], torch.rand(2, 6, 1, 32).to(table)
    found, wanted = cpu.rope(x, cos, sin), reference.rope(x, cos, sin)
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(heads, before), "the input is not touched"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_linear_equals_plain(dtype, rows, bias):
    linear = cpu.OneDNNLinear()
    if reason := linear.unusable(dtype):
        pytest.skip(reason)
    x, weight, b = (
        torch.randn(rows, 48).to(dtype),
        torch.randn(33, 48).to(dtype) / 7,
        torch.randn(33).to(dtype),
    )
    found = linear(x, linear.pack(weight), b if bias else None)
    wanted = reference.PlainLinear()(x, weight, b if bias else None)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_onednn_activation_equals_plain(dtype, act):
    linear = cpu.OneDNNLinear()
    if reason := linear.unusable(dtype):
        pytest.skip(reason)
    x, weight = torch.randn(9, 48).to(dtype), torch.randn(33, 48).to(dtype) / 7
    found = linear(x, linear.pack(weight), None, act)
    wanted = reference.PlainLinear()(x, weight, None, act)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_chosen_forms_are_named():
    assert choose_ops(CPU, torch.bfloat16, "plain").names["linear"] == "plain"
    assert set(reference_ops().names.values()) == {"torch", "plain"}


def test_unusable_onednn_is_said_or_refused(monkeypatch, caplog):
    for linear in (registry._ONEDNN, registry._NATIVE):
        monkeypatch.setattr(linear, "unusable", lambda dtype: "no such operator", raising=False)
    assert choose_ops(CPU, torch.bfloat16).names["linear"] == "plain"
    assert "no such operator" in caplog.text
    with pytest.raises(ConfigError, match="onednn cannot run: no such operator"):
        choose_ops(CPU, torch.bfloat16, "onednn")


def test_onednn_does_not_pack_other_dtypes():
    assert "float64" in cpu.OneDNNLinear().unusable(torch.float64)
