import json

import pytest
from helpers.tiny_folder import TEMPLATE, token_ids, write_folder

from mmserve.core.errors import ModelLoadError
from mmserve.preprocess.spec import PixelBudget, ProcessorSpec


def edit(folder, name, **fields):
    path = folder / name
    tree = json.loads(path.read_text()) if path.exists() else {}
    tree.update(fields)
    path.write_text(json.dumps({k: v for k, v in tree.items() if v is not None}))


def test_reads_a_folder(tmp_path):
    spec = ProcessorSpec.load(write_folder(tmp_path, budget=(1024, 4096), clip=(2048, 8192)))
    ids = token_ids()
    assert (spec.family, spec.patch, spec.merge, spec.temporal_patch, spec.factor) == (
        "qwen3_vl",
        16,
        2,
        2,
        32,
    )
    assert (spec.image, spec.video) == (PixelBudget(1024, 4096), PixelBudget(2048, 8192))
    assert spec.tokens.image == ids["<|image_pad|>"]
    assert spec.eos_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])
    assert spec.sampling == {"top_k": 20}
    assert spec.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert spec.chat_template == TEMPLATE


def test_min_and_max_pixels_win_over_size(tmp_path):
    write_folder(tmp_path, image={"min_pixels": 5000, "max_pixels": 90000})
    assert ProcessorSpec.load(tmp_path).image == PixelBudget(5000, 90000)


def test_reads_the_nested_processor_config(tmp_path):
    write_folder(tmp_path)
    image = json.loads((tmp_path / "preprocessor_config.json").read_text())
    image["size"] = {"shortest_edge": 77, "longest_edge": 7777}
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "video_preprocessor_config.json").unlink()
    edit(tmp_path, "processor_config.json", image_processor=image)
    spec = ProcessorSpec.load(tmp_path)
    assert spec.image == PixelBudget(77, 7777)
    assert spec.video == spec.image


@pytest.mark.parametrize("home", ["chat_template.json", "tokenizer_config.json"])
def test_finds_the_chat_template_wherever_it_is(tmp_path, home):
    write_folder(tmp_path, template=None)
    assert ProcessorSpec.load(tmp_path).chat_template is None
    edit(tmp_path, home, chat_template="{{ messages }}")
    assert ProcessorSpec.load(tmp_path).chat_template == "{{ messages }}"


def test_without_generation_config_the_model_and_tokenizer_name_the_end(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path, "config.json", text_config={"eos_token_id": 3})
    assert ProcessorSpec.load(tmp_path).eos_ids == (3, token_ids()["<|im_end|>"])


def test_greedy_generation_config_means_temperature_zero(tmp_path):
    write_folder(tmp_path)
    edit(tmp_path, "generation_config.json", do_sample=False)
    assert ProcessorSpec.load(tmp_path).sampling["temperature"] == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file_is_named(tmp_path, name):
    write_folder(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ModelLoadError, match=name):
        ProcessorSpec.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("config.json", {"model_type": "llama"}, "llama"),
        ("config.json", {"vision_config": {"patch_size": 14}}, "patch_size"),
        ("preprocessor_config.json", {"image_mean": None}, "image_mean"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, name, fields, said):
    write_folder(tmp_path)
    edit(tmp_path, name, **fields)
    with pytest.raises(ModelLoadError, match=said):
        ProcessorSpec.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_damaged_json_is_a_load_error(tmp_path, text):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError):
        ProcessorSpec.load(tmp_path)
