"""The fused kernels against the plain torch forms: in Triton's interpreter, or on a GPU where one is."""

import pytest
import torch
from helpers.dense_attention import DenseAttention
from helpers.qwen_pairs import Pair

from mmserve.core.config import ModelOptions
from mmserve.models import registry as models
from mmserve.models.ops import reference, registry
from mmserve.models.ops.triton import runtime

DEVICE = torch.device("cpu" if runtime.INTERPRETED else "cuda")
if reason := runtime.unusable(DEVICE):
    pytest.skip(f"Triton cannot run: {reason}", allow_module_level=True)

OPS = registry.triton_ops()
on_cpu = pytest.mark.skipif(not runtime.INTERPRETED, reason="the model of the helpers lives on a CPU")
EPS = 0.03  # large enough to be seen
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64), (7, 1000), (5, 3, 32), (3, 72), (2, 1152), (0, 64)]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # a unit in the last place, for sums in another order


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_close(found, wanted, tolerance=None):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    limit = tolerance or CLOSE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_equal_the_reference(dtype, shape):
    x, weight, bias = randn(*shape, dtype=dtype) + 2, *randn(2, shape[-1], dtype=dtype)
    before = x.clone()
    assert_close(OPS.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert_close(OPS.layer_norm(x, weight, bias, EPS), reference.layer_norm(x, weight, bias, EPS))
    assert torch.equal(x, before), "the input is not touched"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_equals_the_reference(dtype, shape):
    x, residual, weight = (
        randn(*shape, dtype=dtype),
        randn(*shape, dtype=dtype),
        randn(shape[-1], dtype=dtype),
    )
    wanted = reference.add_rms_norm(x, residual, weight, EPS)
    given = residual.clone()
    normed, total = OPS.add_rms_norm(x, given, weight, EPS)
    assert_close(normed, wanted[0])
    assert torch.equal(total, wanted[1])
    assert total.data_ptr() == given.data_ptr(), "the residual sum stays where it was"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 2500)])
def test_silu_and_mul_equals_the_reference(dtype, shape):
    x = 8 * randn(*shape, dtype=dtype)
    assert_close(OPS.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_extremes(dtype):
    gate = torch.tensor([0.0, -0.0, 100.0, -100.0, torch.inf, torch.nan, 3e38]).to(DEVICE, dtype)
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    torch.testing.assert_close(OPS.silu_and_mul(x), reference.silu_and_mul(x), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_apart_are_read_where_they_lie(dtype):
    wide, weight = randn(6, 200, dtype=dtype), randn(72, dtype=dtype)
    part = wide[:, 100:172]
    assert torch.equal(OPS.rms_norm(part, weight, EPS), OPS.rms_norm(part.contiguous(), weight, EPS))
    assert torch.equal(OPS.silu_and_mul(part), OPS.silu_and_mul(part.contiguous()))


def test_what_is_given_as_out_is_written():
    from mmserve.models.ops.triton import activations, norms

    x, residual, weight = randn(3, 64), randn(3, 64), randn(64)
    out = x.new_zeros(3, 64)
    assert norms.rms_norm(x, weight, EPS, out) is out
    assert_close(out, reference.rms_norm(x, weight, EPS))
    assert norms.layer_norm(x, weight, weight, EPS, out) is out
    assert norms.add_rms_norm(x, residual, weight, EPS, out)[0] is out
    half = x.new_zeros(3, 32)
    assert activations.silu_and_mul(x, half) is half
    assert_close(half, reference.silu_and_mul(x))


TABLES = [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("dtype", "table"), TABLES)
@pytest.mark.parametrize("dim", [20, 64, 72, 80, 128])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_rotated_in_place_as_by_the_reference(dtype, table, dim, normed):
    heads = randn(7, 9, dim, dtype=dtype)
    weight = randn(6, dim, dtype=dtype) if normed else None
    cos, sin = randn(2, 7, 1, dim, dtype=table)
    found, wanted = heads.clone(), heads.clone()
    OPS.rotate_heads(found, 6, weight, EPS, cos, sin)
    reference.rotate_heads(wanted, 6, weight, EPS, cos, sin)
    assert_close(
        found, wanted, 6e-2 if dtype == torch.bfloat16 else 2e-6
    )  # the reference rounds products, too
    assert torch.equal(found[:, 6:], heads[:, 6:]), "the values are not touched"


@pytest.mark.parametrize(("slots_first", "slots_dtype"), [(False, torch.int32), (True, torch.int64)])
@pytest.mark.parametrize("split", [(6, 2, 2), (4, 1, 1), (5, 5, 5)])
@pytest.mark.parametrize("dim", [32, 72])
@pytest.mark.parametrize(
    ("dtype", "normed"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)]
)
def test_queries_stay_and_keys_and_values_go_to_their_slots(
    dtype, normed, dim, split, slots_first, slots_dtype
):
    """In either layout of the pool; padding rows are stored nowhere, and no other slot is touched."""
    rows, total = 6, 40
    queries, kv_heads, _ = split
    heads = randn(rows, 2 * sum(split), dim, dtype=dtype)[:, : sum(split)]
    weight = randn(queries + kv_heads, dim, dtype=dtype) if normed else None
    tables = tuple(randn(2, rows, 1, dim, dtype=dtype))
    slots = torch.tensor([3, -1, 39, 0, 17, -1], device=DEVICE, dtype=slots_dtype)
    whole = randn(2, kv_heads, total, dim, dtype=dtype)
    if slots_first:
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
    found, wanted = whole.clone(), whole.clone()
    own, other = heads.clone(), heads.clone()
    OPS.rotate_store(own, split, weight, EPS, tables, (found[0], found[1]), slots)
    reference.rotate_store(other, split, weight, EPS, tables, (wanted[0], wanted[1]), slots)
    tolerance = 6e-2 if dtype == torch.bfloat16 else 2e-6
    assert_close(found, wanted, tolerance)
    assert_close(own[:, :queries], other[:, :queries], tolerance)
    assert torch.equal(own[:, queries + kv_heads :], heads[:, queries + kv_heads :])
    left = [i for i in range(total) if i not in slots.tolist()]
    assert torch.equal(found[:, :, left], whole[:, :, left])
    assert torch.equal(found[1][:, slots[slots >= 0].long()], heads[slots >= 0, -kv_heads:].transpose(0, 1))


@pytest.mark.parametrize(
    ("section", "interleaved"), [((16, 24, 24), False), ((24, 20, 20), True), ((6, 5, 5), True)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 13])
def test_tables_of_both_layouts_of_mrope_equal_the_reference(section, interleaved, dtype, rows):
    from mmserve.models.layers.rope import frequencies, mrope_axes

    width = sum(section)
    axes = mrope_axes(section, interleaved, width).to(DEVICE)
    turns = frequencies(2 * width, 5e6).to(DEVICE)
    positions = torch.randint(0, 100_000, (3, 20)).to(DEVICE)[:, :rows]  # a bucket of static buffers
    found = OPS.mrope(positions, turns, axes, dtype)
    wanted = reference.mrope(positions, turns, axes, dtype)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours, theirs, 8e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 1500])
def test_vision_rows_are_scattered_as_by_the_reference(dtype, width):
    target, features = randn(11, width, dtype=dtype), randn(4, 3, width, dtype=dtype)
    rows = torch.tensor([9, 2, 3, 0], device=DEVICE)
    for ours, plain in (
        (OPS.scatter_rows, reference.scatter_rows),
        (OPS.scatter_add_rows, reference.scatter_add_rows),
    ):
        found, wanted = target.clone(), target.clone()
        ours(found, rows, features[:, 1])
        plain(wanted, rows, features[:, 1])
        assert torch.equal(found, wanted)
        ours(found, torch.full_like(rows, -1), features[:, 2])
        assert torch.equal(found, wanted), "negative rows are padding"


@on_cpu
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_whole_model_computes_the_same_by_kernels(family, tmp_path, monkeypatch):
    """Both towers, with stills and a frame pair, against the same model by the plain forms."""
    plain = Pair(family, tmp_path)
    prompts = [plain.prompt(4, ("image", 4, 6), 3), plain.prompt(2, ("video", 1, 2, 2), 1)]
    with torch.inference_mode():
        wanted = plain.logits(*prompts)
        monkeypatch.setattr(models, "choose_ops", lambda *_: OPS)
        model = models.load_model(ModelOptions(model=str(tmp_path), dtype="float32"))
        plain.model = model
        found = plain.logits(*prompts)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class StoringDense(DenseAttention):
    """The same, with a pool whose slots are the rows in reverse."""

    stores_fused = True

    def __init__(self, rows, kv_heads, dim):
        super().__init__([rows])
        self.pool = torch.zeros(2, kv_heads, rows, dim)
        self.slots = torch.arange(rows).flip(0).int()

    def kv_slots(self, layer):
        return self.pool[0], self.pool[1], self.slots

    def attend(self, q, layer):
        k, v = (side[:, self.slots.long()].transpose(0, 1) for side in self.pool)
        return self.forward(q, k, v, layer)


@on_cpu
def test_an_attention_that_lets_others_store_is_answered_alike(tmp_path):
    pair = Pair("qwen3_vl", tmp_path)
    prompt = pair.prompt(4, ("image", 4, 6), 3)
    text = pair.model.config.text
    storing = StoringDense(len(prompt.ids), text.num_kv_heads, text.head_dim)
    with torch.inference_mode():
        found = pair.forward([prompt], storing)
        torch.testing.assert_close(found, pair.logits(prompt)[0], rtol=1e-5, atol=1e-5)


def test_all_forms_are_chosen_on_a_gpu_that_runs_them(monkeypatch):
    monkeypatch.setattr(runtime, "unusable", lambda device: None)
    ops = registry.choose_ops(torch.device("cuda"), torch.bfloat16)
    assert {name for op, name in ops.names.items() if op != "linear"} == {"triton"}
    assert ops.rms_norm is OPS.rms_norm


def test_where_triton_cannot_run_torch_does_and_the_reason_is_said(monkeypatch, caplog):
    monkeypatch.setattr(runtime, "unusable", lambda device: "triton cannot be imported")
    ops = registry.choose_ops(torch.device("cuda"), torch.bfloat16)
    assert {name for op, name in ops.names.items() if op != "linear"} == {"torch"}
    assert ops.embed_patches is None
    assert "in Triton they cannot: triton cannot be imported" in caplog.text
    assert "float64" in registry.triton_unusable(torch.device("cuda"), torch.float64)
