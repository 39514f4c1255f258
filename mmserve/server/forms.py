"""The form that a request asks its answer to have: ``response_format``, ``structured_outputs``, tools."""

import json
from typing import Any

from msgspec import Struct

from mmserve.core.errors import InvalidGrammar, InvalidRequest
from mmserve.core.messages import Grammar
from mmserve.parsing.json_object import DEEPEST, too_deep
from mmserve.parsing.tool_grammar import ToolForm, tool_grammar
from mmserve.parsing.toolbox import Toolbox
from mmserve.server.errors import unsupported

MOST_SOURCE = 256 << 10  # characters of a schema, pattern or grammar


class JsonSchema(Struct, kw_only=True):
    """OpenAI's wrapping of a schema. ``strict`` makes no difference: a schema always holds here."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        schema = self.json_schema.schema if self.json_schema else None
        return _of_type(self.type, schema, "response_format", "json_schema.schema")


class TextFormat(JsonSchema, kw_only=True):
    """The same as /v1/responses has it in ``text.format``: flat."""

    type: str = "text"

    def grammar(self) -> Grammar | None:
        return _of_type(self.type, self.schema, "text.format", "schema")


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these, under the names that vLLM gives them."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def to_grammar(self) -> Grammar:
        given = [name for name in self.__struct_fields__ if getattr(self, name)]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs takes one of {', '.join(self.__struct_fields__)}, not {len(given)}",
                param="structured_outputs",
            )
        name = given[0]
        kind = "json_schema" if name == "json" else name
        return _grammar(kind, getattr(self, name), f"structured_outputs.{name}")


def form_of(
    wanted: ResponseFormat | TextFormat | None, structured_outputs: StructuredOutputs | None
) -> Grammar | None:
    """The grammar of the one that is given; InvalidRequest when both ask for a form."""
    first = wanted.grammar() if wanted else None
    second = structured_outputs.to_grammar() if structured_outputs else None
    if first and second:
        raise InvalidRequest(
            f"{_field(first)} and structured_outputs both ask for a form; give one",
            param="structured_outputs",
        )
    return first or second


def form_with_tools(form: Grammar | None, tools: Toolbox, template: str | None) -> Grammar | None:
    """The grammar of an answer that may call ``tools``; InvalidRequest if it must have another ``form`` too,
    or if the chat ``template`` knows no tools."""
    if not tools.callable:
        return form
    written = ToolForm.of(template or "")
    if written is None:
        raise unsupported("tools", "this model's chat template knows no tools; leave tools out")
    if form is not None:
        raise InvalidRequest(
            f"an answer that may call tools cannot be kept to a form; give tools or {_field(form)}, or set"
            " tool_choice to none",
            param=_field(form),
        )
    return tool_grammar(tools, written)


def _field(form: Grammar) -> str:
    """The field of the request that asked for ``form``."""
    param = form.param or ""
    return "text.format" if param.startswith("text.format") else param.partition(".")[0]


def _of_type(kind: str, schema: dict[str, Any] | None, where: str, schema_at: str) -> Grammar | None:
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object", param=where)
    if kind != "json_schema":
        raise InvalidRequest(
            f"{where}.type must be text, json_object or json_schema, not {kind[:100]!r}",
            param=f"{where}.type",
        )
    param = f"{where}.{schema_at}"
    if schema is None:
        raise InvalidRequest(f"{param} is missing", param=param)
    return _grammar("json_schema", schema, param)


def _grammar(kind: Any, value: Any, param: str) -> Grammar:
    if kind == "json_object":
        return Grammar("json_object", param=param)
    if too_deep(value):
        raise InvalidGrammar(f"{param} is nested more than {DEEPEST} deep", param=param)
    source = value if isinstance(value, str) else json.dumps(value)
    if len(source) > MOST_SOURCE:
        raise InvalidGrammar(
            f"{param} has {len(source)} characters; at most {MOST_SOURCE} are allowed", param=param
        )
    return Grammar(kind, source, param)
