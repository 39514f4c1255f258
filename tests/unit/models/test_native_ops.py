"""The small operations in C++ against the plain torch forms, and each row against itself in other company."""

import pytest
import torch

from mmserve.models.ops import reference, registry
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.native.ops import native_ops
from mmserve.models.ops.registry import choose_ops

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64), (7, 1024), (5, 3, 32), (3, 72), (2, 20), (300, 768), (0, 64)]
ULPS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # one unit in the last place, for sums in another order


@pytest.fixture(scope="module")
def native():
    try:
        return native_ops()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_equal(found, wanted):
    assert found.dtype == wanted.dtype
    limit = ULPS[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_equal_the_reference(native, dtype, shape):
    x, (weight, bias) = torch.randn(shape).to(dtype), torch.randn(2, shape[-1]).to(dtype)
    before = x.clone()
    assert_equal(native.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert_equal(native.layer_norm(x, weight, bias, 1e-6), reference.layer_norm(x, weight, bias, 1e-6))
    assert torch.equal(x, before), "the input is not touched"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_equals_the_reference(native, dtype, shape):
    (x, residual), weight = torch.randn(2, *shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wanted = reference.add_rms_norm(x, residual, weight, 1e-6)
    normed, total = native.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert_equal(normed, wanted[0])
    assert torch.equal(total, wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "rows"), [(0, []), (1, [0]), (9, [7, -1, 3, -1]), (40, [*range(30, 40), -1])]
)
def test_rows_are_scattered_as_by_the_reference_and_as_by_torch(native, dtype, count, rows):
    target, rows = torch.randn(count, 200).to(dtype), torch.tensor(rows, dtype=torch.int64)
    features = torch.randn(len(rows), 3, 200).to(dtype)[:, 1]
    kept = rows >= 0
    for op, plain in (("scatter_rows", "index_copy"), ("scatter_add_rows", "index_add")):
        wanted = getattr(target, plain)(0, rows[kept], features[kept])
        for form in (native, reference):
            found = target.clone()
            getattr(form, op)(found, rows, features)
            assert torch.equal(found, wanted), form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul_equals_the_reference(native, dtype, shape):
    x = 8 * torch.randn(shape).to(dtype)
    assert_equal(native.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_extremes(native, dtype):
    gate = torch.tensor([0.0, -0.0, 100.0, -100.0, torch.inf, torch.nan, 3e38, -3e38]).to(dtype)
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    torch.testing.assert_close(native.silu_and_mul(x), reference.silu_and_mul(x), equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "table"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("dim", [8, 20, 32, 64, 72, 80, 128])
@pytest.mark.parametrize("rows", [1, 6, 300])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_rotated_in_place_as_by_the_reference(native, dtype, table, dim, rows, normed):
    heads = torch.randn(rows, 5, dim).to(dtype)
    weight = torch.randn(4, dim).to(dtype) if normed else None
    cos, sin = torch.rand(2, rows, 1, dim).to(table)
    found, wanted = heads.clone(), heads.clone()
    native.rotate_heads(found, 4, weight, 1e-6, cos, sin)
    reference.rotate_heads(wanted, 4, weight, 1e-6, cos, sin)
    tolerance = 4e-2 if dtype == torch.bfloat16 else 2e-6  # the reference rounds each product, too
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[:, 4:], heads[:, 4:]), "the values are not touched"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_apart_are_read_where_they_lie(native, dtype):
    wide, weight = torch.randn(6, 200).to(dtype), torch.randn(72).to(dtype)
    part = wide[:, 100:172]
    assert torch.equal(native.rms_norm(part, weight, 1e-6), native.rms_norm(part.contiguous(), weight, 1e-6))
    assert torch.equal(native.silu_and_mul(part), native.silu_and_mul(part.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_batch_and_on_any_number_of_threads(native, dtype):
    x, weight = torch.randn(500, 1024).to(dtype), torch.randn(1024).to(dtype)
    cos, sin = torch.rand(2, 500, 1, 128).to(dtype)

    def results(rows):
        heads = x[rows].clone().view(-1, 8, 128)
        native.rotate_heads(heads, 8, weight.view(8, 128), 1e-6, cos[rows], sin[rows])
        few = x[rows]
        return (
            *(native.rms_norm(few, weight, 1e-6), native.layer_norm(few, weight, weight, 1e-6)),
            *(native.silu_and_mul(few), heads),
        )

    together = results(slice(None))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = results(slice(77, 78))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[77:78], b) for a, b in zip(together, alone, strict=True))


def test_native_forms_are_chosen_where_they_run(native):
    assert choose_ops(CPU, torch.bfloat16).names["rms_norm"] == "native"
    assert choose_ops(CPU, torch.float64).names["rms_norm"] == "cpu"


def test_without_a_compiler_torch_runs_them_and_the_reason_is_said(monkeypatch, caplog):
    def unavailable():
        raise NativeUnavailable("there is no compiler")

    monkeypatch.setattr(registry, "native_ops", unavailable)
    assert choose_ops(CPU, torch.bfloat16).names["rms_norm"] == "cpu"
    assert "there is no compiler" in caplog.text
