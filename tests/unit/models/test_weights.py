"""Loading: name layouts, shards, tied and untied heads, dummy weights, and errors that name the tensor."""

import json

import pytest
import torch
from helpers.qwen_pairs import Pair, make_reference
from safetensors.torch import load_file, save_file

from mmserve.core.config import ModelOptions
from mmserve.core.errors import ModelLoadError
from mmserve.models.registry import load_model

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl-untied-bias")


@pytest.fixture(params=NAMES)
def pair(request, tmp_path):
    return Pair(request.param, tmp_path)


@pytest.fixture
def folder(tmp_path):
    make_reference("qwen3_vl-untied-bias").save_pretrained(tmp_path)
    return tmp_path


def load(folder, **values):
    return load_model(ModelOptions(model=str(folder), dtype="float32", **values))


def tensors(folder):
    return load_file(folder / "model.safetensors")


def write(folder, values):
    save_file(values, folder / "model.safetensors")


def answer(pair, model):
    pair.model = model
    return pair.logits(pair.prompt(3, ("image", 4, 4), 2))[0]


def to_shards(folder, values, count=3):
    """Spread ``values`` over shards with an index, as large checkpoints are published."""
    weight_map = {}
    for i in range(count):
        part = dict(list(values.items())[i::count])
        shard = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_both_name_layouts_give_the_same_model(pair):
    wanted = answer(pair, pair.model)
    values = tensors(pair.folder)
    if any(name.startswith("model.language_model.") for name in values):
        renames = [("model.language_model.", "model."), ("model.visual.", "visual.")]
    else:
        renames = [("model.", "model.language_model."), ("visual.", "model.visual.")]
    for old, new in renames:
        values = {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in values.items()}
    write(pair.folder, values)
    assert torch.equal(answer(pair, load(pair.folder)), wanted)


def test_shards_give_the_same_model(pair):
    wanted = answer(pair, pair.model)
    to_shards(pair.folder, tensors(pair.folder))
    assert torch.equal(answer(pair, load(pair.folder)), wanted)


def test_parameters_are_counted_once(pair):
    assert pair.model.num_parameters == sum(p.numel() for p in pair.reference.parameters())


def test_head_beside_a_tied_embedding_is_passed_over(tmp_path):
    pair = Pair("qwen3_vl", tmp_path)
    wanted = answer(pair, pair.model)
    values = tensors(tmp_path)
    values["lm_head.weight"] = torch.zeros_like(values["model.language_model.embed_tokens.weight"])
    write(tmp_path, values)
    assert torch.equal(answer(pair, load(tmp_path)), wanted)


def test_missing_tensor_is_named(folder):
    values = tensors(folder)
    del values["lm_head.weight"], values["model.visual.merger.linear_fc1.bias"]
    write(folder, values)
    with pytest.raises(
        ModelLoadError, match=r"lacks 2 tensors \(lm_head.weight, model.visual.merger.linear_fc1"
    ):
        load(folder)


def test_unexpected_tensor_is_named(folder):
    write(folder, tensors(folder) | {"model.language_model.layers.3.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(ModelLoadError, match=r"1 unexpected tensor \(model.language_model.layers.3.mlp.up"):
        load(folder)


def test_long_lists_are_cut(folder):
    values = {k: v for k, v in tensors(folder).items() if ".layers.1." not in k}
    write(folder, values)
    with pytest.raises(ModelLoadError, match="and 10 more"):
        load(folder)


def test_tensor_of_a_wrong_shape_is_named(folder):
    values = tensors(folder)
    values["model.language_model.norm.weight"] = torch.ones(65)
    write(folder, values)
    with pytest.raises(ModelLoadError, match=r"norm.weight is \[65\], config.json makes it \[64\]"):
        load(folder)


def test_integer_tensor_is_refused(folder):
    values = tensors(folder)
    values["model.language_model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    write(folder, values)
    with pytest.raises(ModelLoadError, match=r"norm.weight is of type I8"):
        load(folder)


def test_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        load(folder)


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load(folder)


def test_missing_shard_is_named(folder):
    to_shards(folder, tensors(folder))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks 1 shard \(model-00002-of-00003.safetensors\)"):
        load(folder)


def test_tensor_that_is_not_in_the_shard_its_index_names(folder):
    values = tensors(folder)
    to_shards(folder, values)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00003.safetensors"
    index["weight_map"]["model.language_model.norm.weight"] = "model-00002-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="that the index places in them"):
        load(folder)


def test_dummy_weights_need_no_file_and_repeat_by_seed(tmp_path):
    pair = Pair("qwen3_vl", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    options = ModelOptions(model=str(tmp_path), dtype="float32", load_format="dummy")
    first, second, other = (answer(pair, load_model(options, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
    assert first.std() > 0
    assert load_model(options).num_parameters == sum(p.numel() for p in pair.reference.parameters())


def test_dtype_follows_the_checkpoint(folder):
    def dtype_of(name):
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"dtype": name}))
        return load_model(ModelOptions(model=str(folder))).dtype

    assert dtype_of("float32") == torch.float32
    assert dtype_of("bfloat16") == torch.bfloat16
    assert dtype_of("float16") == torch.bfloat16
    with pytest.raises(ModelLoadError, match="float8_e4m3fn"):
        dtype_of("float8_e4m3fn")
