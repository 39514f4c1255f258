import pytest

from mmserve.models.hub import resolve
from mmserve.preprocess.bad_words import spelled
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def text():
    return TextTokenizer(ProcessorSpec.load(resolve("mmserve/tiny-vl")))


@pytest.mark.parametrize("word", ["red", " red", "circle", "ünfug"])
def test_a_word_is_spelled_as_at_a_beginning_and_behind_a_space(text, word):
    ways = spelled([word], text)
    assert [text.decode(way) for way in ways] == [word.strip(), " " + word.strip()]


def test_each_way_is_told_once_and_white_space_is_a_word(text):
    assert spelled(["red", " red", "red"], text) == spelled(["red"], text)
    assert [text.decode(way) for way in spelled([" "], text)] == [" "]
    assert spelled([], text) == ()


def test_the_name_of_a_special_token_is_that_token(text):
    assert (text.encode("<|im_end|>")[0],) in spelled(["<|im_end|>"], text)
