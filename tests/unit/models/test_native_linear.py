"""The native linear layer against float64, and the same bits whatever stands beside a row."""

import subprocess
from pathlib import Path

import pytest
import torch

from mmserve import backends
from mmserve.core.config import Config, ModelOptions, RunnerOptions
from mmserve.core.errors import ConfigError
from mmserve.models.ops import cpu, reference, registry
from mmserve.models.ops.native import library
from mmserve.models.ops.native import linear as native
from mmserve.models.ops.native.linear import NativeLinear, Panels
from mmserve.models.ops.registry import choose_ops

CPU = torch.device("cpu")
LINEAR = NativeLinear()
CPUINFO = Path("/proc/cpuinfo")
X86_FMA = CPUINFO.exists() and {"avx2", "fma", "bmi2"} <= set(CPUINFO.read_text().split())
ROWS = [*range(1, 71), 128, 504, 505, 513, 1100]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    if reason := LINEAR.unusable(torch.bfloat16):
        pytest.skip(reason)


def forget():
    for cached in (library.load, library._folder, library._version, native._kernels):
        cached.cache_clear()


def weights(outputs, inputs):
    return (torch.randn(outputs, inputs) / inputs**0.5).bfloat16(), torch.randn(outputs).bfloat16()


def exact(x, weight, bias, act=None):
    y = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return y if act is None else reference.ACTIVATIONS[act](y)


def assert_rounded(found, wanted):
    """Half a unit of bf16's last place, and what float32 sums leave of it."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2e-6)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 17), (32, 64), (65, 385), (100, 801)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_any_number_of_rows_equals_float64(outputs, inputs, with_bias):
    weight, bias = weights(outputs, inputs)
    packed, bias = LINEAR.pack(weight), bias if with_bias else None
    for rows in ROWS:
        x = torch.randn(rows, inputs).bfloat16()
        assert_rounded(LINEAR(x, packed, bias), exact(x, weight, bias))


@pytest.mark.parametrize("act", reference.ACTIVATIONS)
@pytest.mark.parametrize("scale", [1, 30])
def test_activation_is_applied_before_the_one_rounding(act, scale):
    weight, bias = weights(70, 48)
    x = (torch.randn(29, 48) * scale).bfloat16()
    assert_rounded(LINEAR(x, LINEAR.pack(weight), bias, act), exact(x, weight, bias, act))


@pytest.mark.parametrize("act", [None, *reference.ACTIVATIONS])
def test_infinities_and_nans_stay_what_they_are(act):
    values = torch.tensor([[float("inf")], [float("nan")], [3e38], [-3e38], [-0.0]]).bfloat16()
    one = torch.ones(1, 1).bfloat16()
    found, wanted = LINEAR(values, LINEAR.pack(one), None, act), exact(values, one, None, act).bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


def test_rows_may_lie_apart_and_columns_too():
    weight, bias = weights(40, 50)
    packed, wide = LINEAR.pack(weight), torch.randn(20, 120).bfloat16()
    for x in (
        wide[:, 7:57],
        wide[:, 0:100:2],
        wide[::3, :50],
        wide[:5, :100].reshape(5, 2, 50),
        wide[0, :50],
    ):
        found = LINEAR(x, packed, bias)
        assert found.shape == (*x.shape[:-1], 40)
        assert torch.equal(found, LINEAR(x.contiguous(), packed, bias))
        assert_rounded(found, exact(x, weight, bias))


@pytest.mark.parametrize("shape", [(0, 50), (3, 0, 50)])
def test_no_rows_give_no_rows(shape):
    weight, bias = weights(40, 50)
    assert LINEAR(torch.empty(shape).bfloat16(), LINEAR.pack(weight), bias).shape == (*shape[:-1], 40)


@pytest.mark.parametrize("act", [None, "gelu", "silu"])
def test_a_row_is_the_same_bit_for_bit_alone_and_in_any_batch(act):
    weight, bias = weights(77, 801)
    packed, x = LINEAR.pack(weight), torch.randn(max(ROWS), 801).bfloat16()
    alone = torch.cat([LINEAR(x[i : i + 1], packed, bias, act) for i in range(len(x))])
    for rows in ROWS:
        assert torch.equal(LINEAR(x[:rows], packed, bias, act), alone[:rows]), f"{rows} rows"
        assert torch.equal(LINEAR(x[-rows:], packed, bias, act), alone[-rows:]), f"the last {rows} rows"


@pytest.mark.parametrize("rows", [1, 8, 25, 70, 600])
def test_any_number_of_threads_gives_the_same_bits(rows):
    weight, bias = weights(500, 801)
    x, found = torch.randn(rows, 801).bfloat16(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(LINEAR(x, LINEAR.pack(weight), bias, "silu"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.skipif(not X86_FMA, reason="the builds are for x86-64 with AVX2 and FMA")
@pytest.mark.parametrize(("build", "same_bits"), [("x86-64-v3", True), ("x86-64", False)])
def test_builds_for_older_cpus_give_the_same(build, same_bits, tmp_path, monkeypatch):
    (weight, bias), x = weights(77, 801), torch.randn(30, 801).bfloat16()
    own = LINEAR(x, LINEAR.pack(weight), bias, "gelu")
    flags = tuple(f"-march={build}" if flag == "-march=native" else flag for flag in library.FLAGS)
    monkeypatch.setattr(library, "FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    older = LINEAR(x, LINEAR.pack(weight), bias, "gelu")
    alone = LINEAR(x[7:8], LINEAR.pack(weight), bias, "gelu")
    forget()
    assert torch.equal(older[7:8], alone)
    assert_rounded(older, exact(x, weight, bias, "gelu"))
    assert not same_bits or torch.equal(older, own), "where multiply-add is fused the sums are the same"


def test_packed_weights_keep_every_value_and_the_true_number_of_outputs():
    weight, _ = weights(45, 9)
    packed = LINEAR.pack(weight)
    assert isinstance(packed, Panels)
    assert packed.outputs == 45
    assert LINEAR(torch.eye(9).bfloat16(), packed, None).T.equal(weight)
    strided = torch.randn(9, 45).bfloat16().T
    assert torch.equal(LINEAR.pack(strided).values, LINEAR.pack(strided.contiguous()).values)


def test_what_does_not_fit_is_refused():
    weight, bias = weights(40, 50)
    packed, x = LINEAR.pack(weight), torch.randn(3, 50)
    with pytest.raises(ValueError, match="x is"):
        LINEAR(x, packed, bias)
    with pytest.raises(ValueError, match=r"\[3, 49\], not bfloat16 \[\.\.\., 50\]"):
        LINEAR(x[:, :49].bfloat16(), packed, bias)
    with pytest.raises(ValueError, match="x is"):
        LINEAR(torch.zeros(2, 50, 25).bfloat16(), packed, bias)
    with pytest.raises(ValueError, match="bias is"):
        LINEAR(x.bfloat16(), packed, bias[:30])
    with pytest.raises(ValueError, match="bias is"):
        LINEAR(x.bfloat16(), packed, bias.float())
    with pytest.raises(TypeError, match="float32"):
        LINEAR.pack(weight.float())


@pytest.mark.parametrize(
    ("cpuinfo", "pairs", "runs", "why"),
    [
        ("flags : avx2 avx512f avx512_vnni\n", False, "native", "no bf16 instructions"),
        ("flags : avx512f avx512_bf16\n", True, "native", "avx512_bf16"),
        ("flags : avx512f avx512_bf16\n", False, "onednn", "avx512_bf16"),  # an old compiler
        ("flags : avx512_bf16 amx_bf16 amx_int8\n", True, "onednn", "amx_bf16"),
        ("Features : asimd i8mm bf16\n", False, "onednn", "bf16"),
        ("Features : asimd\n", False, "native", "no bf16 instructions"),
        ("model name : no bf16\n", False, "native", "no bf16 instructions"),
    ],
)
def test_auto_goes_by_the_instructions_of_the_cpu(cpuinfo, pairs, runs, why, monkeypatch, caplog):
    monkeypatch.setattr(type(registry._NATIVE), "multiplies_bf16", pairs)
    monkeypatch.setattr(cpu.Path, "read_text", lambda path: cpuinfo)
    monkeypatch.setattr(registry._ONEDNN, "unusable", lambda dtype: None, raising=False)
    monkeypatch.setattr(registry._NATIVE, "unusable", lambda dtype: None, raising=False)
    caplog.set_level("INFO")
    ops = choose_ops(CPU, torch.bfloat16)
    assert ops.names["linear"] == runs
    assert why in ops.linear_why
    assert f"run as {runs}" in caplog.text


def test_float32_stays_with_onednn():
    assert choose_ops(CPU, torch.float32).names["linear"] in ("onednn", "plain")
    with pytest.raises(
        ConfigError, match="native cannot run: it keeps weights in bfloat16 only, not in float32"
    ):
        choose_ops(CPU, torch.float32, "native")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    forget()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    forget()


def test_without_a_compiler_onednn_runs_and_the_reason_is_told(no_compiler, monkeypatch, caplog):
    monkeypatch.setattr(registry.cpu, "bf16_instructions", lambda: None)
    monkeypatch.setattr(registry._ONEDNN, "unusable", lambda dtype: None, raising=False)
    config = Config(model=ModelOptions(device="cpu", dtype="bfloat16"))
    told = backends.expected(config)["linear"]
    assert told["runs"] == "onednn"
    assert "native cannot run: there is no C++ compiler" in told["why"]
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"native cannot run: there is no C\+\+ compiler"):
        choose_ops(CPU, torch.bfloat16, "native")


def test_doctor_shows_what_was_asked_for():
    config = Config(
        model=ModelOptions(device="cpu", dtype="bfloat16"), runner=RunnerOptions(linear_backend="native")
    )
    assert backends.expected(config)["linear"] == {"runs": "native", "why": "asked for"}


def test_pairs_are_taken_as_bf16_where_the_compiler_knows_the_cpus_instruction(no_compiler, tmp_path):
    assert not LINEAR.multiplies_bf16, "without a compiler there is nothing"


def test_what_is_multiplied_at_a_time_follows_what_the_compiler_makes_of_this_cpu():
    command = [library.compiler(), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert LINEAR.multiplies_bf16 == ("__AVX512BF16__" in macros)
