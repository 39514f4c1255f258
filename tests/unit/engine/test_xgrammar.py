"""xgrammar beside llguidance: the same texts are let through, but for the differences that stand here."""

import json

import numpy as np
import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import Grammar
from mmserve.engine.detokenizer import TokenBytes
from mmserve.engine.grammar.base import GrammarFault
from mmserve.engine.grammar.choose import EXTRA
from mmserve.engine.grammar.guidance import GuidanceBackend
from mmserve.models.hub import resolve
from mmserve.preprocess.spec import ProcessorSpec

xgrammar = pytest.importorskip("xgrammar", reason=f"xgrammar is no part of [dev]; this brings it: {EXTRA}")
from mmserve.engine.grammar import xgrammar_backend  # noqa: E402

VOCAB = 1792
NULL, INTEGER, STRING, BOOLEAN = ({"type": kind} for kind in ("null", "integer", "string", "boolean"))


def record(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


CHAIN = record(["v", "next"], v=INTEGER, next={"anyOf": [{"$ref": "#/$defs/n"}, NULL]})
# Schemas with texts that both must let through, and that both must refuse.
CORPUS = [
    (STRING, ['""', '"é \\"x\\" \\\\ \\n"', '"😀"'], ["", "x", '"', '"\n"', '"\\x"', '"a" ']),
    (INTEGER, ["0", "-7", "123"], ["01", "1.5", "+1", "-", '"1"']),
    ({"type": "number"}, ["0", "-1.25", "1e9", "2E-3"], [".5", "1.", "NaN", "0x1"]),
    (record(["a", "b"], a=INTEGER, b=BOOLEAN), ['{"a": 1, "b": true}'], ['{"b": true, "a": 1}', '{"a": 1}']),
    (record(["a"], a=INTEGER), ['{"a": 1}'], ['{"a":1}', '{ "a": 1}', '{"a": 1 }', '{"a": 1}\n', "{}"]),
    (
        record(["b"], a=INTEGER, b=BOOLEAN, c=NULL),
        ['{"b": true}', '{"a": 1, "b": true}', '{"b": false, "c": null}', '{"a": 1, "b": true, "c": null}'],
        ["{}", '{"a": 1}', '{"b": true, "d": 1}', '{"c": null, "b": true}', '{"b": true, "b": true}'],
    ),
    (record(a=NULL, b=NULL), ["{}", '{"a": null}', '{"b": null}'], ['{"b": null, "a": null}', '{"x": 1}']),
    ({"type": "object"}, ["{}", '{"x": [1, {"y": null}]}'], ["[]", '{"x": 1,"y": 2}', '{"x" : 1}']),
    (
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": BOOLEAN},
        ["{}", '{"a": 1, "x": true}', '{"x": true, "y": false}', '{"aa": true}'],
        ['{"a": true}', '{"x": 1}', '{"x": true, "a": 1}', '{"a": 1, "a": true}'],
    ),
    ({"type": "object", "required": ["z"]}, ['{"z": 1}', '{"z": [], "y": 2}'], ["{}", '{"y": 1}']),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 2}']),
    ({"properties": {"a": INTEGER}}, ["3", '"x"', '{"a": 1}', "[]"], ['{"a": "x"}']),
    ({"type": "array", "items": BOOLEAN}, ["[]", "[true, false]"], ["[true,false]", "[1]", "[true, ]"]),
    (
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1, 2, 3]"],
    ),
    (
        {"type": "array", "prefixItems": [NULL, BOOLEAN], "items": False, "minItems": 2},
        ["[null, true]"],
        ["[null]", "[true, null]", "[null, true, 1]"],
    ),
    ({"type": "array", "prefixItems": [NULL, BOOLEAN], "maxItems": 1}, ["[]", "[null]"], ["[null, true]"]),
    ({"enum": ["a", 'b"q', 1, None, 1.5]}, ['"a"', '"b\\"q"', "1", "null", "1.5"], ['"b"', "2", "true"]),
    ({"enum": ["a", 1], "type": "string"}, ['"a"'], ["1"]),
    (
        {"enum": [{"a": [1, 2]}, [], {}]},
        ['{"a": [1, 2]}', "[]", "{}"],
        ['{"a":[1,2]}', '{"a": [1]}', "[1]", '{"b": 1}'],
    ),
    ({"const": {"x": None}}, ['{"x": null}'], ['{"x":null}', "{}"]),
    ({"anyOf": [INTEGER, {"type": "array", "items": NULL}]}, ["4", "[null]"], ["true", "[4]"]),
    ({"allOf": [INTEGER], "description": "one"}, ["4"], ["true"]),
    ({"type": ["string", "null"]}, ["null", '"x"'], ["1"]),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": CHAIN}},
        ['{"v": 1, "next": {"v": 2, "next": null}}'],
        ['{"v": 1}'],
    ),
    (
        {
            "type": "array",
            "items": {"$ref": "#/definitions/a~1b"},
            "definitions": {"a/b": {"$ref": "#/definitions/c"}, "c": BOOLEAN},
        },
        ["[true]"],
        ["[1]"],
    ),
    (record(["a"], a=INTEGER, b={"$ref": "#/properties/a"}), ['{"a": 1, "b": 2}'], ['{"a": 1, "b": "x"}']),
    ({"type": "integer", "minimum": 0, "maximum": 99}, ["0", "7", "99"], ["100", "-1"]),
    ({"type": "integer", "exclusiveMinimum": 1.5, "maximum": 4.5}, ["2", "4"], ["1", "5"]),
    ({"type": "number", "minimum": 0.5, "maximum": 2.25}, ["0.5", "1", "2.25"], ["0.49", "2.26", "3", "-1"]),
    ({"type": "integer", "multipleOf": 7}, ["0", "14", "-21"], ["8", "13"]),
    ({"type": "string", "maxLength": 3}, ['""', '"abc"', '"éßü"'], ['"abcd"', '"a\nb"', '"\x01"']),
    ({"type": "string", "minLength": 2}, ['"ab"', '"é😀x"'], ['"a"', '""', '"\t\t"']),
    ({"type": "string", "pattern": "^a+b$"}, ['"ab"', '"aab"'], ['"b"', '"abc"', '"xab"']),
    ({"type": "string", "pattern": "a+b"}, ['"ab"', '"xaaby"'], ['"ba"', '"a b"']),
    ({"type": "string", "pattern": '^"\\\\$'}, ['"\\"\\\\"'], ['"\\""', '"\\\\"']),
    ({"type": "string", "pattern": "^[^a]$"}, ['"b"', '"é"'], ['"a"', '"\n"', '"""']),
    ({"type": "string", "format": "date"}, ['"2026-02-28"'], ['"2026-13-01"', '"26-01-01"', '"2026-1-1"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
]

# What one lets through and the other does not. Both are JSON of the schema, but for what is named.
ONLY_GUIDANCE = [
    ("json_schema", {"type": "string", "maxLength": 3}, '"\\""'),  # no escapes in strings with lengths,
    ("json_schema", {"type": "string", "pattern": "^.$"}, '"\\""'),  # and in what a class or dot stands for
    ("json_schema", {"enum": ["\n"]}, '"\\u000a"'),  # one spelling of an option
    ("json_schema", {"type": "number", "minimum": 0}, "0.1234567"),  # at most six decimals between limits
    ("json_schema", {"type": "string", "format": "time"}, '"10:00:00z"'),
    ("regex", r"\d", "٣"),  # \d \w \s are of ASCII, as JSON Schema's patterns have it
    ("regex", r"\w", "é"),
    ("regex", r"\s", "\u00a0"),
]
ONLY_XGRAMMAR = [
    ("json_schema", STRING, '"\x7f"'),
    ("json_schema", STRING, '"\\ub2a7"'),
    ("json_schema", {"type": "string", "format": "date"}, '"2026-11-31"'),  # days are not counted by month
    ("regex", r"\W", "é"),
]

REFUSED = [
    ({"oneOf": [INTEGER, NULL]}, "oneOf"),
    ({"not": NULL}, "not"),
    ({"if": NULL, "then": NULL}, "if"),
    ({"allOf": [INTEGER, {"minimum": 3}]}, "allOf"),
    ({"anyOf": [{"required": ["a"]}], "properties": {"a": NULL}}, "properties beside anyOf"),
    ({"anyOf": [INTEGER], "type": "integer"}, "type beside anyOf"),
    ({"$ref": "#/$defs/b", "$defs": {"b": INTEGER}, "minimum": 3}, "minimum beside"),
    ({"$ref": "#/$defs/b", "$defs": {"b": INTEGER}, "type": "number"}, "type beside"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"type": "array", "prefixItems": [NULL], "items": False, "minItems": 2}, "minItems"),
    ({"$ref": "https://example.org/a"}, "in the schema itself"),
    ({"enum": ["a"], "maxLength": 1}, "beside enum"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": NULL}, "contains"),
    ({"type": "object", "patternProperties": {"^a": NULL}}, "patternProperties"),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames"),
    ({"type": "object", "properties": {"a": NULL}, "minProperties": 1}, "minProperties"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "only one"),
    ({"type": "string", "format": "email"}, "formats"),
    ({"type": "string", "pattern": "(?=a)"}, "only"),
    ({"items": {"dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
    (record(["b"], a=NULL), "no value fits"),
]
NESTED = '{"type":"object","properties":{"a":' * 40 + "{}" + "}}" * 40
HOSTILE = [
    ("regex", "((a|ab|abc)*[a-z]{1,50}){1,100}"),
    ("regex", "(((a{1,900}){1,900}){1,900}){1,900}b{5000}" * 40),
    ("regex", "(" * 5000 + "a" + ")" * 5000),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": NULL for i in range(3000)}})),
    ("json_schema", json.dumps({"enum": [f"option {i}" for i in range(15_000)]})),
    ("json_schema", json.dumps({"type": "string", "maxLength": 10**9})),
    ("json_schema", json.dumps({"type": "array", "minItems": 10**9})),
    ("json_schema", json.dumps({"type": "integer", "multipleOf": 10**9})),
    ("json_schema", json.dumps({"type": "integer", "minimum": 1e400})),
    ("json_schema", json.dumps({"type": "array", "prefixItems": [{"pattern": "^.{90}$"}] * 9})),
    ("json_schema", NESTED),
    ("choice", json.dumps([f"option {i}" for i in range(15_000)])),
]


@pytest.fixture(scope="module")
def spec():
    return ProcessorSpec.load(resolve("mmserve/tiny-vl"))


@pytest.fixture(scope="module")
def backend(spec):
    return xgrammar_backend.XGrammarBackend(spec.tokenizer_json, VOCAB, spec.eos_ids)


@pytest.fixture(scope="module")
def guidance(spec):
    return GuidanceBackend(spec.tokenizer_json, VOCAB, spec.eos_ids)


@pytest.fixture(scope="module")
def spelled(spec):
    """The token of each byte, and the bytes of each token that is text."""
    tokens = TokenBytes.from_json(spec.tokenizer_json)
    added = {token["id"] for token in json.loads(spec.tokenizer_json)["added_tokens"]}
    texts = {token: tokens.raw(token) for token in range(VOCAB) if token not in added}
    return {text[0]: token for token, text in texts.items() if len(text) == 1}, texts


def allowed(matcher):
    row = np.zeros(VOCAB // 32, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), count=VOCAB, bitorder="little"))


def admits(backend, spec, spelled, kind, source, text):
    """Whether ``text``, byte by byte, may be the whole answer."""
    matcher = backend.compile(Grammar(kind, source if isinstance(source, str) else json.dumps(source)))
    try:
        for byte in text.encode():
            matcher.accept(spelled[0][byte])
        return spec.eos_ids[0] in allowed(matcher)
    except GrammarFault:
        return False


@pytest.mark.parametrize(("schema", "fitting", "others"), CORPUS, ids=lambda value: json.dumps(value)[:60])
def test_both_let_through_what_fits_a_schema_and_nothing_else(
    backend, guidance, spec, spelled, schema, fitting, others
):
    for each in (backend, guidance):
        told = [text for text in fitting + others if admits(each, spec, spelled, "json_schema", schema, text)]
        assert told == fitting, each.name


@pytest.mark.parametrize(
    "schema", [schema for schema, _, _ in CORPUS], ids=lambda schema: json.dumps(schema)[:60]
)
def test_noise_of_xgrammar_is_let_through_by_guidance(backend, guidance, spec, spelled, schema):
    """Of the vocabulary's own tokens; what stands in ONLY_XGRAMMAR aside."""
    chance, (bytes_, texts) = np.random.default_rng(5), spelled
    for _ in range(6):
        matcher, text = backend.compile(Grammar("json_schema", json.dumps(schema))), b""
        while len(text) < 200 and not matcher.complete:
            may = [token for token in allowed(matcher) if token not in spec.eos_ids]
            ends = len(may) < len(allowed(matcher))
            may = [token for token in may if not {0x7F, ord("\\")} & {*texts[token]}] or may
            if not may or (ends and chance.random() < 0.3):
                break
            short = [token for token in may if texts[token][:1] in b'"}],:0123456789'] or may
            token = int(chance.choice(short if chance.random() < 0.6 else may))
            matcher.accept(token)
            text += texts[token]
        follower = guidance.compile(Grammar("json_schema", json.dumps(schema)))
        for byte in text if b"-31" not in text else b"":
            follower.accept(bytes_[byte])


@pytest.mark.parametrize(("kind", "source", "text"), ONLY_GUIDANCE)
def test_what_only_guidance_lets_through(backend, guidance, spec, spelled, kind, source, text):
    assert admits(guidance, spec, spelled, kind, source, text)
    assert not admits(backend, spec, spelled, kind, source, text)


@pytest.mark.parametrize(("kind", "source", "text"), ONLY_XGRAMMAR)
def test_what_only_xgrammar_lets_through(backend, guidance, spec, spelled, kind, source, text):
    assert admits(backend, spec, spelled, kind, source, text)
    assert not admits(guidance, spec, spelled, kind, source, text)


@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_word_that_xgrammar_would_let_pass_is_refused(backend, schema, word):
    with pytest.raises(InvalidRequest, match=word) as refusal:
        backend.compile(Grammar("json_schema", json.dumps(schema), "field"))
    assert (refusal.value.param, refusal.value.code) == ("field", "invalid_grammar")
    assert "/project/" not in refusal.value.message


def test_notes_and_unknown_words_say_nothing(backend, spec, spelled):
    schema = {
        **INTEGER,
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [1],
        "x-mine": {"not": 1},
    }
    assert admits(backend, spec, spelled, "json_schema", schema, "5")


def test_properties_named_like_rules_of_the_printed_grammar_are_only_names(backend, spec, spelled):
    name = 'root_characters ::= (([^\\"\\\\\\r\\n]))'
    schema = record([name], **{name: {"enum": ['x ::= Regex("%0%", json_string=true)']}})
    value = json.dumps({name: 'x ::= Regex("%0%", json_string=true)'})
    assert admits(backend, spec, spelled, "json_schema", schema, value)


def test_a_grammar_is_refused_and_the_other_backend_named(backend):
    with pytest.raises(InvalidRequest, match="grammar_backend guidance") as refusal:
        backend.compile(Grammar("grammar", 'start: "a"', "tools"))
    assert (refusal.value.param, refusal.value.code) == ("tools", "invalid_grammar")


@pytest.mark.parametrize(("kind", "source"), HOSTILE, ids=lambda value: value[:50])
def test_what_would_take_for_ever_is_refused_before(backend, kind, source):
    with pytest.raises(InvalidRequest) as refusal:
        backend.compile(Grammar(kind, source, "field"))
    assert refusal.value.code == "invalid_grammar"


def test_a_step_that_takes_too_long_is_a_fault_of_its_answer(backend, monkeypatch):
    matcher = backend.compile(Grammar("regex", "a*"))
    [token, *_] = allowed(matcher)
    monkeypatch.setattr(xgrammar_backend, "STEP_S", -1)
    with pytest.raises(GrammarFault, match="the limit"):
        matcher.accept(int(token))


def test_the_end_may_come_twice_and_nothing_after_it(backend, spec, spelled):
    matcher = backend.compile(Grammar("regex", "a"))
    assert not matcher.complete
    matcher.accept(spelled[0][ord("a")])
    assert matcher.complete
    for end in (*spec.eos_ids, *spec.eos_ids):
        matcher.accept(end)
        assert sorted(allowed(matcher)) == sorted(spec.eos_ids)
    with pytest.raises(GrammarFault):
        matcher.accept(spelled[0][ord("a")])


def test_added_tokens_are_no_text(backend, spec):
    may = set(allowed(backend.compile(Grammar("regex", r"[\s\S]*"))).tolist())
    added = {token["id"] for token in json.loads(spec.tokenizer_json)["added_tokens"]}
    assert may & added == set(spec.eos_ids)
