"""What a tool's parameters are, for calls whose arguments are plain text."""

from collections.abc import Mapping
from typing import Any

from mmserve.parsing.json_object import compact, strict

Schema = Mapping[str, Any]

_DEPTH = 8  # references followed; a schema may refer to itself
_MATCHES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: type(v) is int or (isinstance(v, float) and v.is_integer()),
    "number": lambda v: type(v) in (int, float),
}
_CASED = {
    "True": "true",
    "False": "false",
    "None": "null",
}  # as a model that has read much Python writes them


def types_of(parameters: Schema, name: str) -> frozenset[str]:
    """The JSON types that ``parameters``, a tool's JSON schema, allows for one of its properties.

    Empty if it does not say.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, parameters, _DEPTH)


def json_text(text: str, types: frozenset[str]) -> str:
    """``text``, said in the place of a value of one of ``types``, as JSON.

    It is what it reads as in JSON where that is allowed, or where no types are known; else a string.
    """
    said = _CASED.get(text.strip(), text)
    try:
        value = strict(said)
    except ValueError:
        return compact(text)
    if not types:
        return said.strip() if not isinstance(value, str) else compact(text)
    fits = any(_MATCHES[t](value) for t in types if t in _MATCHES)
    return said.strip() if fits else compact(text)


def _types(schema: Any, root: Schema, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(root, schema["$ref"]), root, depth - 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(t for t in declared if isinstance(t, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_name(v) for v in schema["enum"])
    branches = [b for word in ("anyOf", "oneOf", "allOf") for b in schema.get(word) or ()]
    return frozenset().union(*(_types(b, root, depth - 1) for b in branches))


def _referred(root: Schema, reference: str) -> Any:
    """What ``#/$defs/x`` names inside ``root``; None if nothing."""
    place: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def _type_name(value: Any) -> str:
    return next((name for name, matches in _MATCHES.items() if matches(value)), "string")
