"""A budget for thoughts: when it is used, nothing may come but the end of the thoughts."""

import json

import numpy as np
import pytest
import torch

from mmserve.core.messages import Grammar, PreparedRequest, SamplingParams
from mmserve.core.thinking import Thinking, ThoughtCount
from mmserve.engine.grammar.base import GrammarFault
from mmserve.engine.grammar.guidance import GuidanceBackend
from mmserve.engine.grammar.mask import steer
from mmserve.engine.grammar.steering import Steering
from mmserve.engine.grammar.thinking import ThinkingMatcher, steered
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.scheduler.request import Request
from mmserve.models.hub import resolve
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.tokenizer import TextTokenizer

OPEN, CLOSE, END, BREAK, WORD = 31, 32, 95, 3, 7
VOCAB = 96
EVERY = set(range(VOCAB))


def thinking(budget=None, inside=False):
    return Thinking(OPEN, CLOSE, (BREAK, CLOSE, BREAK), (END,), inside, budget)


def allowed(matcher, vocab=VOCAB):
    row = np.full(-(-vocab // 32), 0x5A5A5A5A, np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), count=vocab, bitorder="little")).tolist())


def after(matcher, *tokens):
    for token in tokens:
        assert token in allowed(matcher)
        matcher.accept(token)
    return allowed(matcher)


class Form:
    """An answer of one WORD."""

    complete = free = False

    def fill(self, row):
        row[:] = 0
        row[0] = 0 if self.complete else 1 << WORD

    def accept(self, token):
        if token != WORD:
            raise GrammarFault("no word")
        self.complete = True


def test_thoughts_are_free_until_the_budget_is_used_then_closed():
    matcher = ThinkingMatcher(thinking(budget=2, inside=True))
    assert after(matcher) == EVERY - {END}
    assert after(matcher, WORD) == EVERY - {END}
    assert after(matcher, WORD) == {BREAK}
    assert after(matcher, BREAK) == {CLOSE}
    assert after(matcher, CLOSE) == {BREAK}
    assert after(matcher, BREAK) == EVERY


def test_a_model_that_opens_the_tag_itself_has_the_same_budget():
    matcher = ThinkingMatcher(thinking(budget=1))
    assert after(matcher) == EVERY
    assert after(matcher, OPEN, WORD) == {BREAK}


def test_no_budget_at_all_closes_at_once():
    assert after(ThinkingMatcher(thinking(budget=0, inside=True))) == {BREAK}
    assert after(ThinkingMatcher(thinking(budget=0)), OPEN) == {BREAK}


def test_thoughts_that_end_in_time_are_left_alone():
    matcher = ThinkingMatcher(thinking(budget=3, inside=True))
    assert after(matcher, WORD, WORD, CLOSE) == EVERY
    assert after(matcher, *[WORD] * 9) == EVERY


def test_an_answer_without_thoughts_is_left_alone_and_opens_none_later():
    matcher = ThinkingMatcher(thinking(budget=0))
    assert after(matcher, WORD, OPEN, WORD) == EVERY


def test_the_form_is_that_of_the_answer_alone():
    matcher = ThinkingMatcher(thinking(), Form())
    assert after(matcher) == {OPEN, WORD}
    assert after(matcher, OPEN, BREAK, WORD) == EVERY - {END}
    assert not matcher.complete
    assert after(matcher, CLOSE) == {WORD}
    after(matcher, WORD)
    assert matcher.complete


def test_a_form_without_thoughts_is_complete_as_ever():
    matcher = ThinkingMatcher(thinking(), Form())
    after(matcher, WORD)
    assert matcher.complete


@pytest.mark.parametrize("tokens", [(WORD, END), (WORD, WORD, WORD)])
def test_a_token_that_was_not_allowed_is_a_fault(tokens):
    matcher = ThinkingMatcher(thinking(budget=2, inside=True))
    for token in tokens[:-1]:
        matcher.accept(token)
    with pytest.raises(GrammarFault):
        matcher.accept(tokens[-1])


def test_a_copy_goes_its_own_way():
    one = ThinkingMatcher(thinking(budget=1, inside=True))
    other = one.copy()
    one.accept(WORD)
    assert (allowed(one), allowed(other)) == ({BREAK}, EVERY - {END})


def test_only_a_form_or_a_budget_steers():
    assert steered(None, None) is None
    assert steered(thinking(), None) is None
    assert steered(thinking(budget=0), None)
    assert steered(thinking(), Form())
    assert steered(None, Form())


def test_what_has_nothing_to_say_any_more_is_free():
    steering = steered(thinking(budget=9), None)
    steering.accept(OPEN)
    assert not steering.free
    steering.accept(CLOSE)
    assert steering.free
    steering = steered(thinking(), Form())
    steering.accept(WORD)
    assert not steering.free


def test_a_request_drops_what_has_nothing_to_say_any_more():
    one = np.ones(1, np.int32)
    prepared = PreparedRequest(
        request_id="a",
        token_ids=one,
        radix_keys=one,
        positions=one,
        position_delta=0,
        items=(),
        sampling=SamplingParams(),
    )
    request = Request(
        prepared, 0, 9, frozenset(), PageTable(1), steered(thinking(budget=1, inside=True), None)
    )
    for token in (WORD, BREAK, CLOSE):
        request.append(token)
        assert request.steering is not None
    request.append(BREAK)
    assert request.steering is None


@pytest.mark.parametrize(
    ("inside", "tokens", "count"),
    [
        (True, (WORD, WORD, CLOSE, WORD), 2),
        (False, (OPEN, WORD, CLOSE, WORD, OPEN, WORD), 1),
        (False, (WORD, WORD), 0),
        (True, (OPEN, WORD), 1),
        (False, (CLOSE, OPEN, WORD), 1),
    ],
)
def test_thoughts_are_counted_without_their_tags(inside, tokens, count):
    counted = ThoughtCount(thinking(inside=inside))
    for token in tokens:
        counted.add(token)
    assert counted.tokens == count


def test_what_closes_thoughts_at_their_budget_is_none():
    counted = ThoughtCount(thinking(budget=2, inside=True))
    for token in (WORD, WORD, BREAK, CLOSE, BREAK, WORD):
        counted.add(token)
    assert counted.tokens == 2


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_thought_about_and_then_answers_in_its_form(seed):
    spec = ProcessorSpec.load(resolve("mmserve/tiny-vl"))
    tokenizer = TextTokenizer(spec)
    [opening], [closing] = tokenizer.encode("<think>"), tokenizer.encode("</think>")
    rule = Thinking(opening, closing, (closing,), spec.eos_ids, inside=True, budget=12)
    form = GuidanceBackend(spec.tokenizer_json, 1792, spec.eos_ids).compile(Grammar("regex", "(yes|no)!"))
    steering, tokens = Steering(ThinkingMatcher(rule, form)), []
    generator = torch.Generator().manual_seed(seed)
    while not tokens or tokens[-1] not in spec.eos_ids:
        logits = torch.randn(1, 1792, generator=generator)
        steer(logits, [steering])
        tokens.append(int(logits.argmax()))
        steering.accept(tokens[-1])
        assert steering.fault is None
    assert tokens.index(closing) <= 12
    answer = tokenizer.decode(tokens[tokens.index(closing) + 1 :])
    assert answer in ("yes!", "no!"), json.dumps(answer)
