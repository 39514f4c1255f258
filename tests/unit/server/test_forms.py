"""Which grammar a request's fields mean, and what is wrong with those that mean none."""

import json

import msgspec
import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import Grammar
from mmserve.parsing.json_object import DEEPEST
from mmserve.server.forms import MOST_SOURCE, ResponseFormat, StructuredOutputs, form_of


def form(response_format=None, structured_outputs=None):
    return form_of(
        msgspec.convert(response_format, ResponseFormat | None),
        msgspec.convert(structured_outputs, StructuredOutputs | None),
    )


def nested(depth):
    return {"not": nested(depth - 1)} if depth > 1 else {}


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ((None, None), None),
        (({"type": "text"}, None), None),
        (({"type": "json_object"}, None), Grammar("json_object", param="response_format")),
        (
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, None),
            Grammar("json_schema", json.dumps(SCHEMA), "response_format.json_schema.schema"),
        ),
        ((None, {"json": SCHEMA}), Grammar("json_schema", json.dumps(SCHEMA), "structured_outputs.json")),
        ((None, {"json": "{}"}), Grammar("json_schema", "{}", "structured_outputs.json")),
        ((None, {"json_object": True}), Grammar("json_object", param="structured_outputs.json_object")),
        ((None, {"regex": "a+"}), Grammar("regex", "a+", "structured_outputs.regex")),
        ((None, {"choice": ["a", "b"]}), Grammar("choice", '["a", "b"]', "structured_outputs.choice")),
        (
            ({"type": "text"}, {"grammar": "start: x"}),
            Grammar("grammar", "start: x", "structured_outputs.grammar"),
        ),
    ],
)
def test_a_form_is_read(fields, grammar):
    assert form(*fields) == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (({"type": "yaml"}, None), "response_format.type"),
        (({"type": "json_schema"}, None), "response_format.json_schema.schema"),
        (({"type": "json_schema", "json_schema": {"name": "x"}}, None), "response_format.json_schema.schema"),
        ((None, {}), "structured_outputs"),
        ((None, {"choice": []}), "structured_outputs"),
        ((None, {"regex": "a", "choice": ["a"]}), "structured_outputs"),
        (({"type": "json_object"}, {"regex": "a"}), "structured_outputs"),
        ((None, {"regex": "a" * (MOST_SOURCE + 1)}), "structured_outputs.regex"),
        ((None, {"json": nested(DEEPEST + 1)}), "structured_outputs.json"),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refusal:
        form(*fields)
    assert refusal.value.param == param
