"""Noise, kept to the grammar of a toolbox, is calls of its tools."""

import json

import pytest
import torch
from helpers.cut_text import told

from mmserve.core.thinking import Start
from mmserve.engine.grammar.guidance import GuidanceBackend
from mmserve.engine.grammar.mask import steer
from mmserve.engine.grammar.steering import Steering
from mmserve.models.hub import resolve
from mmserve.parsing.combined import AnswerParser
from mmserve.parsing.tool_grammar import ToolForm, tool_grammar
from mmserve.parsing.toolbox import read_toolbox
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.tokenizer import TextTokenizer

LOOK = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "mode": {"enum": ["fast", 'with "care"']},
        "box": {"$ref": "#/$defs/box"},
    },
    "required": ["count", "mode"],
    "additionalProperties": False,
    "$defs": {"box": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "look"}}
VOCAB = 1792


@pytest.fixture(scope="module")
def spec():
    return ProcessorSpec.load(resolve("mmserve/tiny-vl"))


@pytest.fixture(scope="module")
def backend(spec):
    return GuidanceBackend(spec.tokenizer_json, VOCAB, spec.eos_ids)


def compiled(backend, box, form):
    return Steering(backend.compile(tool_grammar(box, form)))


def noise(backend, spec, box, form, seed, most=400):
    """Text drawn from noise under the grammar, until it may end."""
    generator = torch.Generator().manual_seed(seed)
    steering, tokens = compiled(backend, box, form), []
    while len(tokens) < most:
        logits = torch.randn(1, VOCAB, generator=generator)
        logits[0, list(spec.eos_ids)] += 3  # long answers show nothing more
        steer(logits, [steering])
        tokens.append(int(logits.argmax()))
        if tokens[-1] in spec.eos_ids:
            return TextTokenizer(spec).decode(tokens[:-1])
        steering.accept(tokens[-1])
        assert steering.fault is None
    raise AssertionError("it never ended")


def calls(box, text):
    parser = AnswerParser(Start.OUTSIDE, box.schemas)
    _, content, found = told([*parser.feed(text), *parser.finish()])
    return content, [(name, json.loads(arguments)) for name, arguments in found]


def is_look(arguments):
    assert set(arguments) <= {"count", "mode", "box"}
    assert 0 <= arguments["count"] <= 99
    assert arguments["mode"] in LOOK["properties"]["mode"]["enum"]
    assert all(isinstance(flag, bool) for flag in arguments.get("box", []))


@pytest.mark.parametrize("form", ToolForm)
@pytest.mark.parametrize("seed", range(6))
def test_a_required_call_is_one_of_the_tools_and_nothing_else(backend, spec, form, seed):
    box = read_toolbox(TOOLS, "required")
    content, found = calls(box, noise(backend, spec, box, form, seed))
    assert content == ""
    assert found
    for name, arguments in found:
        is_look(arguments) if name == "look" else None
        assert name in ("look", "stop")


@pytest.mark.parametrize("form", ToolForm)
@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called_once(backend, spec, form, seed):
    box = read_toolbox(TOOLS, NAMED)
    [(name, arguments)] = calls(box, noise(backend, spec, box, form, seed))[1]
    assert name == "look"
    is_look(arguments)


@pytest.mark.parametrize("form", ToolForm)
def test_without_parallel_calls_one_is_all(backend, spec, form):
    box = read_toolbox(TOOLS, "required", False)
    assert {len(calls(box, noise(backend, spec, box, form, seed))[1]) for seed in range(5)} == {1}


@pytest.mark.parametrize("form", ToolForm)
def test_strict_tools_leave_words_free_and_keep_calls_to_their_schema(backend, spec, form):
    box, tokenizer = read_toolbox(TOOLS), TextTokenizer(spec)
    steering = compiled(backend, box, form)
    for token in tokenizer.encode("a < b <tool_call>"):
        steering.accept(token)
    assert steering.fault is None
    steering.accept(tokenizer.encode("x")[0])
    assert steering.fault


def test_tagged_text_may_be_anything_up_to_its_closing_tag(backend, spec):
    parameters = {"properties": {"what": {"type": "string"}}, "required": ["what"]}
    box = read_toolbox(
        [{"type": "function", "function": {"name": "look", "parameters": parameters}}], "required"
    )
    steering, tokenizer = compiled(backend, box, ToolForm.CODER), TextTokenizer(spec)
    text = (
        "<tool_call>\n<function=look>\n<parameter=what>\na <b>\n</b>\n</parameter>\n</function>\n</tool_call>"
    )
    for token in tokenizer.encode(text):
        steering.accept(token)
        assert steering.fault is None
    assert calls(box, text) == ("", [("look", {"what": "a <b>\n</b>"})])


def test_a_free_choice_of_lax_tools_needs_no_grammar():
    assert tool_grammar(read_toolbox(TOOLS[1:]), ToolForm.HERMES) is None
    assert tool_grammar(read_toolbox(TOOLS, "none"), ToolForm.HERMES) is None


def test_the_template_shows_the_form():
    assert ToolForm.of("... <tool_call>\n<function=x> ...") is ToolForm.CODER
    assert ToolForm.of("... <tool_call>\n{...} ...") is ToolForm.HERMES
    assert ToolForm.of("{{ messages }}") is None
