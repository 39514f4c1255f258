"""Linear layers in int8: the native kernels against the plain form, and whole models against float32."""

import ctypes
import subprocess

import pytest
import torch
from helpers.qwen_pairs import MODELS, Pair

from mmserve.core.config import ModelOptions
from mmserve.core.errors import ConfigError
from mmserve.models.ops import registry
from mmserve.models.ops.native import int8, library
from mmserve.models.ops.native.library import NativeUnavailable
from mmserve.models.ops.quantized import GROUP, PlainInt8Linear, quantize
from mmserve.models.ops.reference import ACTIVATIONS, PlainLinear
from mmserve.models.ops.registry import choose_ops
from mmserve.models.registry import load_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
PLAIN = PlainInt8Linear()
# Compiled for fewer instructions than this CPU may have, so that each way to multiply is tried.
KINDS = {"own": (), "avx2": ("-mno-avx512f",), "avx512": ("-mno-avx512vnni",), "portable": ("-march=x86-64",)}
SHAPES = [(32, 64), (33, 48), (70, 1023), (5, 3), (1, 1), (96, 2 * GROUP), (40, 2 * GROUP + 20)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def native():
    try:
        return int8.NativeInt8Linear()
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=KINDS)
def any_kind(request, native, tmp_path_factory):
    """The kernels compiled for this CPU, and for less of it."""
    if not KINDS[request.param]:
        return native
    if "x86" not in library.platform.machine():
        pytest.skip("these are kinds of x86")
    path = tmp_path_factory.mktemp("kernels") / "int8.so"
    flags = (*library.FLAGS, *KINDS[request.param])
    source = str(library.HERE / "int8.cpp")
    subprocess.run([library.compiler(), *flags, "-o", str(path), source], check=True, timeout=120)
    kernels = ctypes.CDLL(str(path))
    kernels.int8_path.restype = ctypes.c_char_p
    kind = kernels.int8_path().decode()
    if kind != request.param or (kind != "portable" and kind not in library._cpu()):
        pytest.skip(f"this CPU gives {kind} here")
    return int8.NativeInt8Linear(kernels)


def layer(n, k, dtype=torch.float32):
    return (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)


def assert_one_rounding_apart(found, wanted):
    """Of the output's own dtype, and of the float32 sums before it."""
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=4e-6)


# ---------------------------------------------------------------- the formula


def test_codes_are_rounded_to_the_nearest_step_of_the_largest():
    codes, scales = quantize(
        torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 3.4], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    )
    assert codes.tolist() == [[127, -127, 0, 2, -2, 3], [0, 0, 0, 0, 0, 0]]
    assert scales.tolist() == [[1.0], [0.0]]


def test_plain_form_is_close_to_the_unquantised_layer():
    (weight, bias), x = layer(64, 600), torch.randn(20, 600)
    found = PLAIN(x, PLAIN.pack(weight), bias, "gelu")
    wanted = PlainLinear()(x, weight, bias, "gelu")
    assert (found - wanted).norm() < 0.015 * wanted.norm()


def test_an_outlier_costs_its_own_group_precision_not_the_whole_row():
    (weight, _), x = layer(64, 16 * GROUP), torch.randn(8, 16 * GROUP)
    x[:, 7] = 100.0
    weight[:, 7] = 0.0
    wanted = x @ weight.T
    assert (PLAIN(x, PLAIN.pack(weight), None) - wanted).norm() < 0.1 * wanted.norm()


# ---------------------------------------------------------------- native against plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_equals_plain_for_any_number_of_rows(any_kind, shape, dtype):
    weight, bias = layer(*shape, dtype)
    packed, plain = any_kind.pack(weight), PLAIN.pack(weight)
    for rows in (*range(15), 23, 24, 25, 70, 257):
        x = torch.randn(rows, shape[1]).to(dtype)
        assert_one_rounding_apart(any_kind(x, packed, bias), PLAIN(x, plain, bias))


def test_sums_of_integers_are_exact(any_kind):
    """With scales of 1 every number on the way is an integer that float32 holds."""
    k = 2 * GROUP + 20
    weight, x = (torch.randint(-127, 128, (n, k)).float() for n in (50, 30))
    weight[:, 0] = x[:, ::GROUP] = 127.0
    wanted = (x.double() @ weight.double().T).float()
    assert torch.equal(any_kind(x, any_kind.pack(weight), None), wanted)


@pytest.mark.parametrize("value", [127.0, -127.0])
def test_no_sum_saturates(any_kind, value):
    weight, x = torch.full((32, GROUP), 127.0), torch.full((3, GROUP), value)
    assert torch.equal(any_kind(x, any_kind.pack(weight), None), torch.full((3, 32), GROUP * 127.0 * value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_are_applied_before_the_rounding(native, act, dtype):
    (weight, bias), x = layer(45, 80, dtype), torch.randn(19, 80).to(dtype)
    x[0] *= 100
    found, wanted = native(x, native.pack(weight), bias, act), PLAIN(x, PLAIN.pack(weight), bias, act)
    assert_one_rounding_apart(found, wanted)


def test_strided_rows_and_more_axes(native):
    (weight, bias), x = layer(45, 80), torch.randn(2, 6, 200)
    packed = native.pack(weight)
    for view in (x[0, :, 40:120], x[:, ::2, 40:120], x[0, :, ::2][:, :80], x[0, :80].T[:80].T[:, :80]):
        assert torch.equal(native(view, packed, bias), native(view.contiguous(), packed, bias))
    assert native(x[..., :80], packed, bias).shape == (2, 6, 45)


def test_zeros_huge_and_tiny_values(any_kind):
    weight, bias = layer(40, 300)
    weight[3] = 0
    x = torch.randn(6, 300) * torch.tensor([0.0, 1e30, 1e-30, 1e-41, 1.0, 1.0])[:, None]
    x[5, 2] = 1e20
    found, wanted = any_kind(x, any_kind.pack(weight), bias), PLAIN(x, PLAIN.pack(weight), bias)
    assert torch.equal(found[0], bias)
    assert torch.equal(found[:, 3], bias[3].expand(6))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_does_not_pass_for_one(any_kind, value):
    (weight, _), x = layer(40, 300), torch.randn(3, 300)
    x[1, 299] = value
    found = any_kind(x, any_kind.pack(weight), None)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert PLAIN(x, PLAIN.pack(weight), None)[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_weight_are_those_of_the_plain_form(any_kind, dtype):
    weight, _ = layer(70, 45, dtype)
    ids = torch.tensor([69, 0, 3, 3, 31, 32])
    found = any_kind.rows(any_kind.pack(weight), ids, dtype)
    assert torch.equal(found, PLAIN.rows(PLAIN.pack(weight), ids, dtype))
    assert (found - weight[ids]).abs().max() <= weight.abs().max() / 100


def test_what_does_not_fit_is_refused(native):
    weight, bias = layer(8, 16)
    packed = native.pack(weight)
    with pytest.raises(ValueError, match=r"not \[\.\.\., 16\]"):
        native(torch.randn(2, 15), packed, None)
    with pytest.raises(ValueError, match="bias is"):
        native(torch.randn(2, 16), packed, bias.bfloat16())
    for row in (-1, 8):
        with pytest.raises(IndexError, match="from 0 to 7"):
            native.rows(packed, torch.tensor([0, row]), torch.float32)


# ---------------------------------------------------------------- what a result does not depend on


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_batch(any_kind, dtype):
    (weight, bias), x = layer(1000, 600, dtype), torch.randn(70, 600).to(dtype)
    packed = any_kind.pack(weight)
    alone = torch.cat([any_kind(row, packed, bias, "silu") for row in x.split(1)])
    for size in (2, 7, 12, 13, 70):
        assert torch.equal(torch.cat([any_kind(part, packed, bias, "silu") for part in x.split(size)]), alone)


def test_threads_do_not_change_a_bit(native):
    (weight, bias), x = layer(1000, 600), torch.randn(257, 600)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append((native(x, native.pack(weight), bias), native(x[:3], native.pack(weight), bias)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for found in results[1:] for a, b in zip(found, results[0], strict=True))


def test_packed_weights_take_half_of_bfloat16s_memory(native):
    weight, _ = layer(1024, 2048, torch.bfloat16)
    packed = native.pack(weight)
    assert packed.nbytes < 0.51 * weight.nbytes


# ---------------------------------------------------------------- which form runs


def test_the_chosen_form_is_named_and_the_patch_embedding_stays_as_it_is():
    ops = choose_ops(CPU, torch.bfloat16, "plain", "int8")
    assert ops.names["linear"] == ops.quantized.name
    assert (ops.linear.name, ops.names["patch_embedding"]) == ("plain", "plain")
    assert choose_ops(CPU, torch.bfloat16, "plain").quantized is None


def test_without_a_compiler_the_plain_form_runs_and_says_so(monkeypatch, caplog):
    def load(name):
        raise NativeUnavailable("no compiler here")

    monkeypatch.setattr(int8.library, "load", load)
    ops = registry.choose_ops(CPU, torch.float32, "plain", "int8")
    assert isinstance(ops.quantized, PlainInt8Linear)
    assert "no compiler here" in caplog.text
    assert "no compiler here" in ops.linear_why


def test_on_a_gpu_it_is_refused_by_name():
    with pytest.raises(ConfigError, match="quantization int8 runs on a CPU only"):
        choose_ops(torch.device("cuda"), torch.bfloat16, "plain", "int8")


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_close_to_float32(name, tmp_path):
    pair = Pair(name, tmp_path)
    prompts = [pair.prompt(5, ("image", 4, 6), 3), pair.prompt(2, ("video", 2, 4, 4), 4)]
    wanted = pair.logits(*prompts)
    pair.model = load_model(ModelOptions(model=str(tmp_path), dtype="float32", quantization="int8"))
    assert "int8" in pair.model.backends["linear"]
    for found, exact in zip(pair.logits(*prompts), wanted, strict=True):
        assert 0 < (found - exact).norm() < 0.1 * exact.norm()


def test_an_answer_does_not_depend_on_its_neighbours(tmp_path):
    pair = Pair("qwen3_vl", tmp_path)
    pair.model = load_model(ModelOptions(model=str(tmp_path), dtype="float32", quantization="int8"))
    x = torch.randn(9, 64)
    layer = pair.model.language.layers[0].mlp
    assert torch.equal(layer(x)[4], layer(x[4:5])[0])


def test_a_tied_matrix_is_kept_once(tmp_path):
    pair = Pair("qwen3_vl", tmp_path)
    ids = torch.tensor([3, 5])
    wanted = pair.model.language.embed_tokens(ids)
    pair.model = load_model(ModelOptions(model=str(tmp_path), dtype="float32", quantization="int8"))
    embedding = pair.model.language.embed_tokens
    assert list(embedding.parameters()) == []
    assert (embedding(ids) - wanted).abs().max() <= wanted.abs().max() / 200
