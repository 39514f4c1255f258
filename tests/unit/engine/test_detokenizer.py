import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmserve.core.errors import ModelLoadError
from mmserve.engine.detokenizer import Detokenizer, TokenBytes

TEXTS = [
    "The quick brown fox.",
    "一只猫坐在桌子上。日本語もあります。",
    "family 👨‍👩‍👧‍👦 and flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿 and 👍🏽!",
    "naïve café — ½ × π ≈ 1.57\n\ttabs and\r\nlines  ",
    "العربية and עברית mixed",
]


def byte_level(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


TOKENIZER = byte_level(TEXTS)
TOKENS = TokenBytes(TOKENIZER)


def stream(ids, stop=(), min_tokens=0):
    """The pieces given out, and how many tokens were taken."""
    detokenizer = Detokenizer(TOKENS, stop, min_tokens)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.add(token))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.flush()], detokenizer.num_tokens


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text_and_no_piece_has_half_a_character(text):
    ids = TOKENIZER.encode(text).ids
    pieces, _ = stream(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_silent_and_added_words_are_not():
    ids = TOKENIZER.encode("a<think>b<|im_end|>").ids
    assert "".join(stream(ids)[0]) == "a<think>b"
    assert TOKENS.raw(TOKENIZER.token_to_id("<|im_end|>")) == b"<|im_end|>"


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 5), max_size=30))
def test_any_ids_stream_to_what_they_decode_to_at_once(ids):
    assert "".join(stream(ids)[0]) == TOKENIZER.decode([i for i in ids if i < TOKENIZER.get_vocab_size()])


def test_the_flush_shows_an_unfinished_character():
    ids = [TOKENIZER.token_to_id(c) for c in "ðŁĳ"]  # three of the four bytes of an emoji
    pieces, _ = stream(ids)
    assert pieces == ["", "", "", "\ufffd"]


@settings(max_examples=300)
@given(
    st.text("ab \n👍", max_size=25),
    st.lists(st.text("ab \n👍", min_size=1, max_size=4), max_size=4),
    st.integers(0, 2**32),
)
def test_stop_strings_never_leak_whatever_the_token_borders(text, stop, seed):
    """The text may come in any tokens, down to single bytes."""
    rng = random.Random(seed)
    ids = []
    for character in text:
        if rng.random() < 0.5:
            ids += [
                TOKENIZER.token_to_id(c)
                for c in pre_tokenizers.ByteLevel(False).pre_tokenize_str(character)[0][0]
            ]
        else:
            ids += TOKENIZER.encode(character).ids
    starts = [at for s in stop if (at := text.find(s)) >= 0]
    pieces, _ = stream(ids, stop)
    first_seen = first_stop(text, stop)
    assert "".join(pieces) == (text if not starts else text[:first_seen])


def first_stop(text, stop):
    """Where the text ends: before the earliest start among those complete at the first completion."""
    for end in range(1, len(text) + 1):
        found = [at for s in stop if (at := text[:end].find(s)) >= 0]
        if found:
            return min(found)
    return None


def test_text_before_the_stop_is_given_and_counting_ends_there():
    ids = TOKENIZER.encode("one two three").ids
    pieces, taken = stream(ids, stop=["two"])
    assert "".join(pieces) == "one "
    assert taken < len(ids)


def test_stop_strings_wait_for_min_tokens():
    ids = [TOKENIZER.token_to_id(c) for c in "abab"]
    assert "".join(stream(ids, stop=["b"], min_tokens=2)[0]) == "aba"


def test_other_kinds_of_tokenizer_are_refused():
    with pytest.raises(ModelLoadError, match="ByteLevel"):
        TokenBytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


@pytest.mark.parametrize(
    ("stops", "shown"), [(("fox",), "a fox"), (("x.", "fox"), "a fox"), (("fo", "fox"), "a fo")]
)
def test_what_ended_the_text_stays_where_it_is_wanted(stops, shown):
    detokenizer = Detokenizer(TOKENS, stops, with_stop=True)
    pieces = [detokenizer.add(token) for token in TOKENIZER.encode("a fox. The").ids]
    assert "".join(pieces) + detokenizer.flush() == shown


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_are_shown_to_who_asks(special):
    ids = TOKENIZER.encode("quick<|im_end|>").ids
    detokenizer = Detokenizer(TOKENS, with_special=special)
    text = "".join(map(detokenizer.add, ids)) + detokenizer.flush()
    assert text == "quick" + "<|im_end|>" * special
