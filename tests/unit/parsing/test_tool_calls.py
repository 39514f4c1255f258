"""Calls of tools, in both forms, wherever the text is cut; what is no call stays text."""

import json

import pytest
from helpers.cut_text import broken, cuts, parsed, told
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.parsing.events import CallArguments, CallBegin, CallBroken, CallEnd, Content, joined
from mmserve.parsing.tools import ToolParser

TOOLS = {
    "look": {
        "type": "object",
        "properties": {
            "what": {"type": "string"},
            "count": {"type": "integer"},
            "exact": {"type": "boolean"},
            "places": {"type": "array"},
            "near": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "mode": {"enum": ["a", "b"]},
            "box": {"$ref": "#/$defs/box"},
            "any": {},
        },
        "$defs": {"box": {"type": "object"}},
    }
}


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name, **values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def read(*pieces):
    return parsed(ToolParser(TOOLS), pieces)


# ---------------------------------------------------------------- Hermes

NESTED = '{"y": [1, {"z": "}"}]}'
WORDS_AND_CALLS = [
    (hermes("f", '{"x": 1}'), "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
    ("Let me see.\n" + hermes("f", '{ "x" :1 }'), "Let me see.", [("f", '{ "x" :1 }')]),
    (hermes("f", "{}") + "\n" + hermes("g", NESTED), "", [("f", "{}"), ("g", NESTED)]),
    ("A\n" + hermes("f", "{}") + "\nB\n" + hermes("g", "{}") + " \n", "A\n\nB", [("f", "{}"), ("g", "{}")]),
    ("\n" + hermes("f", "{}") + "\n\nDone.\n", "Done.\n", [("f", "{}")]),
    (hermes("f", '{"x": "</tool_call> <tool_call>{"}'), "", [("f", '{"x": "</tool_call> <tool_call>{"}')]),
    (hermes("f", '{"x": "a \\" \\\\"}'), "", [("f", '{"x": "a \\" \\\\"}')]),
    (hermes("größe", '{"ä": "🎨 \\u00e9"}'), "", [("größe", '{"ä": "🎨 \\u00e9"}')]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}</tool_call>', "", [("f", '{"x": "a\\nb"}')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call> B', "B", [("f", '{"x": 1}')]),
    ('A <tool_call>{"name": "f", "arguments": {"x": 1}} B', "A B", [("f", '{"x": 1}')]),
    ("no call\n", "no call\n", []),
    ("  ", "  ", []),
    ("a < b", "a < b", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), WORDS_AND_CALLS)
@pytest.mark.parametrize("cut", [lambda t: [t], list], ids=["whole", "letters"])
def test_calls_are_found_among_words(text, content, calls, cut):
    events = read(*cut(text))
    assert told(events)[1:] == (content, calls)
    assert not broken(events)


NO_CALLS = [
    "<tool_call>",
    "<tool_call> of the wild",
    "<tool_cal",
    "<tool_call>\n{",
    "<tool_call>{}</tool_call> and more",
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
    "<tool_call>{'name': 'f'}</tool_call>",
    '<tool_call>{"name": "f", "argum',
    "<tool_call><function=",
    "<tool_call><function=\n>",
    "<tool_call><function=>",
    "<tool_call><tool_call><tool_call>",
]
BROKEN = [
    hermes("f", '{"x": }'),
    hermes("f", '{"x": NaN}'),
    hermes("f", '{"x": 1]'),
    '<tool_call>{"name": "f", "arguments": {"x": "a',
    "Well. " + hermes("f", '{"x" 1}') + " Hm.",
    "<tool_call><function=f>oops</function></tool_call>",
    "<tool_call>\n<function=f>\n<parameter=x>\n1",
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n",
    "<tool_call>\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>",
    "<tool_call>\n<function=f>\n",
]


@pytest.mark.parametrize("text", NO_CALLS + BROKEN)
@pytest.mark.parametrize("cut", [lambda t: [t], list], ids=["whole", "letters"])
def test_what_is_no_call_is_text_to_the_last_character(text, cut):
    events = read(*cut(text))
    assert told(events)[1:] == (text, [])
    assert broken(events) == (text in BROKEN)


def test_a_call_after_a_broken_one_is_found():
    events = read("<tool_call>oops" + hermes("f", "{}") + hermes("g", "{}}") + "\n" + hermes("h", "{}"))
    assert told(events)[1:] == ("<tool_call>oops}\n</tool_call>", [("f", "{}"), ("g", "{}"), ("h", "{}")])


def test_arguments_are_streamed_as_they_come():
    parser = ToolParser({})
    assert parser.feed('<tool_call>\n{"name": "f", "argu') == []
    assert parser.feed('ments": {"x": "lo') == [CallBegin(0, "f"), CallArguments(0, '{"x": "lo')]
    assert parser.feed('ng"}') == [CallArguments(0, 'ng"}')]
    assert parser.feed("}\n</tool_call>") == [CallEnd(0)]


def test_a_broken_call_is_taken_back_and_the_next_has_its_own_number():
    text = hermes("f", '{"x": }')
    events = read(text + hermes("g", "{}"))
    assert events[2:5] == [CallBroken(0), Content(text), CallBegin(1, "g")]


# ---------------------------------------------------------------- Coder

CODER_VALUES = [
    ({}, {}),
    ({"what": "cats"}, {"what": "cats"}),
    ({"what": "12"}, {"what": "12"}),
    ({"what": ""}, {"what": ""}),
    ({"what": 'a\n"b"\\ <b>\n</b>\n'}, {"what": 'a\n"b"\\ <b>\n</b>\n'}),
    ({"what": "x</parameter>y</parameter>"}, {"what": "x</parameter>y</parameter>"}),
    ({"what": "<tool_call></tool_call></function>"}, {"what": "<tool_call></tool_call></function>"}),
    ({"what": "🎨 é"}, {"what": "🎨 é"}),
    ({"count": "12", "exact": "true"}, {"count": 12, "exact": True}),
    ({"exact": "False", "near": "None"}, {"exact": False, "near": None}),
    ({"count": "many"}, {"count": "many"}),
    ({"count": "1.5"}, {"count": "1.5"}),
    ({"count": "true"}, {"count": "true"}),
    ({"places": '["a", 1]', "box": '{"x": 1}'}, {"places": ["a", 1], "box": {"x": 1}}),
    ({"near": "1.5"}, {"near": 1.5}),
    ({"mode": "a"}, {"mode": "a"}),
    ({"any": "5", "unknown": "[1]", "other": "word"}, {"any": 5, "unknown": [1], "other": "word"}),
]  # fmt: skip


@pytest.mark.parametrize(("values", "arguments"), CODER_VALUES)
@pytest.mark.parametrize("cut", [lambda t: [t], list], ids=["whole", "letters"])
def test_tagged_arguments_become_json_of_the_declared_types(values, arguments, cut):
    _, content, [(name, text)] = told(read(*cut("See:\n" + coder("look", **values) + "\n")))
    assert (name, content) == ("look", "See:")
    assert json.loads(text) == arguments


def test_tagged_strings_are_streamed():
    parser = ToolParser(TOOLS)
    parser.feed("<tool_call>\n<function=look>\n<parameter=what>\n")
    assert joined(parser.feed('two "cats"\n')) == [CallArguments(0, 'two \\"cats\\"')]
    assert joined(parser.feed("</parameter>\n")) == []
    assert joined(parser.feed("</function>")) == [CallArguments(0, '"}')]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=look><parameter=what>x</parameter></function></tool_call>",
        "<tool_call>\n<function=look>\n<parameter=what>\nx\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=what>\nx\n</parameter>\n</function>",
    ],
)
def test_a_forgotten_tag_or_line_break_is_forgiven(text):
    assert told(read(text))[1:] == ("", [("look", '{"what": "x"}')])


# ---------------------------------------------------------------- any text, cut anywhere

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5) | st.sampled_from(["</tool_call>", "{"]), JSON, max_size=3)
SCRAPS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=look>", "<function=", "</function>", "<parameter=what>",
    "<parameter=count>", "</parameter>", "\n", " ", '{"name": "f", "arguments": ', '{"x": "', '"', "}", "{",
    "\\", "1", "word", "<", "</", "é🎨", '"name"', ":", ",",
])  # fmt: skip
CALLS = st.builds(lambda a, i: hermes("f", json.dumps(a, ensure_ascii=i)), ARGUMENTS, st.booleans())
TEXTS = st.lists(SCRAPS | CALLS | st.text(max_size=5), max_size=10).map("".join)


@settings(max_examples=400, deadline=None)
@given(cuts(TEXTS))
def test_where_it_is_cut_changes_nothing(cut):
    text, pieces = cut
    assert read(*pieces) == read(text)


@settings(deadline=None)
@given(ARGUMENTS, st.booleans(), cuts(st.sampled_from(["", "word", "a < b\n"])))
def test_arguments_are_given_out_to_the_letter(arguments, ascii_only, words):
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    assert told(read(*words[1], hermes("f", text)))[2] == [("f", text)]


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_tagged_string_arrives_whole(value):
    [(_, arguments)] = told(read(*coder("look", what=value)))[2]
    assert json.loads(arguments) == {"what": value}


@settings(deadline=None)
@given(TEXTS)
def test_every_call_has_valid_arguments(text):
    for _, arguments in told(read(text))[2]:
        assert isinstance(json.loads(arguments), dict)
