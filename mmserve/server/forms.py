"""The form that a request asks its answer to have: ``response_format`` or ``structured_outputs``."""

import json
from typing import Any

from msgspec import Struct

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import Grammar

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
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_object", param="response_format")
        if self.type != "json_schema":
            raise InvalidRequest(
                f"response_format.type must be text, json_object or json_schema, not {self.type!r}",
                param="response_format.type",
            )
        if self.json_schema is None or self.json_schema.schema is None:
            raise InvalidRequest(
                "response_format.json_schema.schema is missing", param="response_format.json_schema.schema"
            )
        return _grammar("json_schema", self.json_schema.schema, "response_format.json_schema.schema")


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
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> Grammar | None:
    """The grammar of the one that is given; InvalidRequest when both ask for a form."""
    first = response_format.grammar() if response_format else None
    second = structured_outputs.to_grammar() if structured_outputs else None
    if first and second:
        raise InvalidRequest(
            "response_format and structured_outputs both ask for a form; give one", param="structured_outputs"
        )
    return first or second


def _grammar(kind: Any, value: Any, param: str) -> Grammar:
    if kind == "json_object":
        return Grammar("json_object", param=param)
    source = value if isinstance(value, str) else json.dumps(value)
    if len(source) > MOST_SOURCE:
        raise InvalidRequest(
            f"{param} has {len(source)} characters; at most {MOST_SOURCE} are allowed",
            param=param,
            code="invalid_grammar",
        )
    return Grammar(kind, source, param)
