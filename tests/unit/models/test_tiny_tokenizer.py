"""The bundled model's tokenizer: Qwen's form, whole words, every byte."""

import json

import pytest

from mmserve.models.tiny import checkpoint, tokenizer

TEXTS = ["Describe this picture.", "A red fish on the left of a blue ground.", "There are two fish."] * 20


@pytest.fixture(scope="module")
def tok():
    return tokenizer.build(TEXTS, 500)


def test_common_words_are_single_tokens(tok):
    assert len(tok.encode("A red fish on the left").ids) == 6


def test_digits_stay_single(tok):
    assert len(tok.encode("2047").ids) == 4


@pytest.mark.parametrize("text", ["Zürich 雪 🐟", "a\tb\r\n  c", '{"title": "x\'y"}'])
def test_any_text_survives_a_round_trip(tok, text):
    assert tok.decode(tok.encode(text).ids) == text


def test_special_tokens_are_single_and_hidden_on_decoding(tok):
    ids = tok.encode("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>fish<|im_end|>").ids
    assert tok.decode(ids) == "user\nfish"
    assert all(len(tok.encode(token).ids) == 1 for token in tokenizer.SPECIAL + tokenizer.PLAIN)


def test_saved_files_name_every_added_token(tok, tmp_path):
    tokenizer.save(tok, tmp_path, checkpoint.CHAT_TEMPLATE)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = {int(i): entry["content"] for i, entry in saved["added_tokens_decoder"].items()}
    assert added == {tok.token_to_id(t): t for t in tokenizer.SPECIAL + tokenizer.PLAIN}
