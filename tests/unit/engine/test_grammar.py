"""Structured output: what is allowed, what is refused, and whose fault it is."""

import json
import re
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import Grammar
from mmserve.engine.grammar.base import GrammarFault
from mmserve.engine.grammar.choose import EXTRA
from mmserve.engine.grammar.desk import GrammarDesk
from mmserve.engine.grammar.guidance import GuidanceBackend
from mmserve.engine.grammar.mask import steer
from mmserve.engine.grammar.steering import Steering
from mmserve.models.hub import resolve
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.tokenizer import TextTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["title", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def spec():
    return ProcessorSpec.load(resolve("mmserve/tiny-vl"))


@pytest.fixture(scope="module")
def guidance(spec):
    return GuidanceBackend(spec.tokenizer_json, 1792, spec.eos_ids)


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def backend(request, spec):
    if request.param == "guidance":
        return request.getfixturevalue("guidance")
    pytest.importorskip("xgrammar", reason=f"xgrammar is no part of [dev]; this brings it: {EXTRA}")
    from mmserve.engine.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(spec.tokenizer_json, 1792, spec.eos_ids)


def random_answer(backend, spec, grammar, seed, most=400):
    """Tokens drawn from noise, kept to ``grammar``, up to the end token."""
    generator = torch.Generator().manual_seed(seed)
    steering, tokens = Steering(backend.compile(grammar)), []
    while len(tokens) < most:
        logits = torch.randn(1, 1792, generator=generator)
        steer(logits, [steering])
        tokens.append(int(logits.argmax()))
        steering.accept(tokens[-1])
        assert steering.fault is None
        if tokens[-1] in spec.eos_ids:
            return TextTokenizer(spec).decode(tokens)
    return None


@pytest.mark.parametrize("seed", range(5))
def test_noise_kept_to_a_schema_is_json_of_that_schema(backend, spec, seed):
    answer = json.loads(random_answer(backend, spec, Grammar("json_schema", json.dumps(SCHEMA)), seed))
    assert set(answer) == {"title", "count"}
    assert isinstance(answer["count"], int)
    assert len(answer["title"]) <= 12


def test_noise_kept_to_a_pattern_matches_it(backend, spec):
    pattern = "[a-c]{2,5}-(red|blue)"
    answers = {random_answer(backend, spec, Grammar("regex", pattern), seed) for seed in range(8)}
    assert all(re.fullmatch(pattern, answer) for answer in answers)
    assert len(answers) > 1


def test_noise_kept_to_a_choice_is_one_of_it(backend, spec):
    options = ['a "quoted" cat', "a dog", "ein Käse\n"]
    grammar = Grammar("choice", json.dumps(options))
    assert {random_answer(backend, spec, grammar, seed) for seed in range(12)} == set(options)


def test_noise_kept_to_a_grammar_is_of_it(guidance, spec):
    grammar = Grammar("grammar", 'start: "(" start ")" | "x"')
    answer = random_answer(guidance, spec, grammar, 3)
    assert answer in {"(" * n + "x" + ")" * n for n in range(200)}


def test_any_json_object_begins_with_a_brace(backend, spec):
    matcher = backend.compile(Grammar("json_object"))
    row = np.empty(56, np.int32)
    matcher.fill(row)
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), count=1792, bitorder="little"))
    tokenizer = TextTokenizer(spec)
    assert len(allowed)
    assert all(tokenizer.decode([t]).startswith("{") for t in allowed)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", "{", "JSON|Expecting property"),
        ("json_schema", '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000, "recursion"),
        ("grammar", "no rule", "Expected|grammar_backend guidance"),
        ("regex", "(" * 20000 + ")" * 20000, ""),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_reason(backend, kind, source, reason):
    with pytest.raises(InvalidRequest) as refusal:
        backend.compile(Grammar(kind, source, "response_format"))
    assert re.search(reason, refusal.value.message, re.IGNORECASE)
    assert refusal.value.param == "response_format"
    assert refusal.value.code == "invalid_grammar"


def test_a_definition_that_no_text_can_fit_is_refused(backend):
    grammar = Grammar("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "field")
    with pytest.raises(InvalidRequest, match=r"no text can begin|Circular") as caught:
        backend.compile(grammar)
    assert (caught.value.param, caught.value.code) == ("field", "invalid_grammar")
    backend.compile(Grammar("choice", '[""]'))  # nothing at all is a text too


def test_a_monstrous_pattern_works_or_is_at_fault_but_never_hangs(guidance):
    steering = Steering(guidance.compile(Grammar("regex", "(((a{1,900}){1,900}){1,900}){1,900}b{5000}" * 40)))
    logits = torch.randn(1, 1792, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        row = logits.clone()
        steer(row, [steering])
        steering.accept(int(row.argmax()))
    assert steering.fault is None or "limit" in steering.fault or "fuel" in steering.fault


def test_a_token_that_is_not_allowed_is_the_matchers_fault(backend):
    matcher = backend.compile(Grammar("regex", "a"))
    with pytest.raises(GrammarFault):
        matcher.accept(5)


def test_a_faulty_row_is_let_go_and_the_others_are_kept_to_theirs(backend):
    broken = Steering(backend.compile(Grammar("regex", "a")))
    broken.accept(5)
    sound = Steering(backend.compile(Grammar("regex", "b")))
    logits = torch.zeros(3, 1792)
    steer(logits, [broken, None, sound])
    assert broken.fault
    assert sound.fault is None
    assert torch.isfinite(logits[:2]).all()
    assert 0 < torch.isfinite(logits[2]).sum() < 10


def test_one_grammar_is_compiled_once_and_its_matchers_are_apart(backend):
    desk, done = GrammarDesk(lambda: backend), SimpleQueue()
    for _ in range(3):
        desk.request(Grammar("regex", "ab?"), done.put)
    matchers = [done.get(timeout=30).result().copy() for _ in range(3)]
    desk.close()
    assert (desk.compiled, desk.reused) == (1, 2)
    rows = np.zeros((3, 56), np.int32)
    matchers[0].fill(rows[0])
    first = int(np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))[0])
    matchers[0].accept(first)
    for matcher, row in zip(matchers, rows, strict=True):
        matcher.fill(row)
    assert (rows[1] == rows[2]).all()
    assert (rows[0] != rows[1]).any()


def test_a_refused_grammar_is_compiled_again_when_it_is_asked_for_again(backend):
    desk, done = GrammarDesk(lambda: backend), SimpleQueue()
    for _ in range(2):
        desk.request(Grammar("regex", "("), done.put)
        with pytest.raises(InvalidRequest):
            done.get(timeout=30).result()
    desk.close()
    assert desk.compiled == 2
