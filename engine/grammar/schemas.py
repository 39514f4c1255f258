"""JSON schemas, written anew from what a backend holds exactly, and refused where it would let a word pass.

A backend that ignores a word of a schema says nothing of it. Here every word is read: what is not handled and
is known to restrict is a ValueError; what JSON Schema has no meaning for is left out, as it says.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Schema = Mapping[str, Any]

DEEPEST = 32  # schemas in schemas
MOST_SCHEMAS = 1000  # of one form
MOST_PROPERTIES = 100  # of one object; what follows each optional one is an alternative
MOST_OPTIONS = 1000  # of all enums together
MOST_COUNTED = 10_000  # items or characters in a limit
MOST_MULTIPLE = 1000  # of which integers may be multiples; an automaton has so many states

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date", "time", "date-time", "duration", "uuid")
SHARED = ("$defs", "definitions")
# What restricts values, in any draft of JSON Schema, and is not handled below.
_RESTRICTING = frozenset(
    (
        *("not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas", "dependencies"),
        *("propertyNames", "patternProperties", "unevaluatedProperties", "unevaluatedItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef"),
    )
)
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_VALUES = _OF_NUMBERS.union(
    ("minLength", "maxLength", "pattern", "format", "items", "prefixItems", "minItems", "maxItems"),
    ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
)


class Rewriting:
    """One schema on its way. ``named`` is given the pattern of a string and returns what to write for it."""

    def __init__(self, root: Any, named: Callable[[str], str]) -> None:
        self._root = root
        self._named = named
        self._shared: dict[str, Any] = {}  # by what refers to it
        self._names: dict[str, str] = {}
        self._schemas = self._options = 0

    def whole(self) -> dict[str, Any]:
        """The schema of the whole form."""
        if not isinstance(self._root, Mapping):
            raise ValueError("a schema must be an object")
        schema = self._any(self._root, 0)
        return {**schema, "$defs": self._shared} if self._shared else schema

    def _any(self, schema: Any, depth: int) -> dict[str, Any]:
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise ValueError(f"no value fits {json.dumps(schema)[:60]}, or it is no schema")
        self._schemas += 1
        if depth > DEEPEST or self._schemas > MOST_SCHEMAS:
            raise ValueError(f"it is over the limits: {MOST_SCHEMAS} schemas, {DEEPEST} deep in each other")
        _refuse(sorted(_RESTRICTING.intersection(schema)))
        if "$ref" in schema:
            return {"$ref": self._reference(_alone(schema, "$ref"))}
        if "enum" in schema or "const" in schema:
            return self._one_of(schema)
        if "allOf" in schema:
            return self._all_of(_alone(schema, "allOf"), depth)
        if "anyOf" in schema:
            return self._any_of(_alone(schema, "anyOf"), depth)
        return _either([self._typed(kind, schema, depth) for kind in _types(schema)])

    def _reference(self, pointer: Any) -> str:
        """What refers in the new schema to what ``pointer`` does in the old one, which is read once."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise ValueError(f"$ref {str(pointer)[:100]!r}: only what is in the schema itself can be meant")
        if pointer not in self._names:
            name = self._names[pointer] = f"#/$defs/s{len(self._names)}"
            self._shared[name.rpartition("/")[2]] = self._any(_found(self._root, pointer), 1)
        return self._names[pointer]

    def _one_of(self, schema: Schema) -> dict[str, Any]:
        options = [schema["const"]] if "const" in schema else schema["enum"]
        if ("const" in schema and "enum" in schema) or not isinstance(options, list):
            raise ValueError("enum must be a list, and stand without const")
        _refuse(sorted((_OF_VALUES | {"anyOf", "allOf"}).intersection(schema)), "beside enum or const")
        self._options += len(options)
        if self._options > MOST_OPTIONS:
            raise ValueError(f"it is over the limits: {MOST_OPTIONS} options")
        kinds = _types(schema)
        fitting = [option for option in options if any(_is(option, kind) for kind in kinds)]
        if not fitting:
            raise ValueError("no option of the enum fits")
        plain = [option for option in fitting if not isinstance(option, list | dict)]
        nested = [_exactly(option) for option in fitting if isinstance(option, list | dict)]
        return _either([{"enum": plain}, *nested] if plain else nested)

    def _all_of(self, several: Any, depth: int) -> dict[str, Any]:
        if not isinstance(several, list) or len(several) != 1:
            raise ValueError("allOf of more than one schema cannot be kept to")
        return self._any(several[0], depth + 1)

    def _any_of(self, several: Any, depth: int) -> dict[str, Any]:
        if not isinstance(several, list) or not several:
            raise ValueError("anyOf must be a list of schemas")
        return _either([self._any(schema, depth + 1) for schema in several])

    def _typed(self, kind: str, schema: Schema, depth: int) -> dict[str, Any]:
        match kind:
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema, depth)
            case "object":
                return self._object(schema, depth)
            case "integer" | "number":
                return _number(kind, schema)
        return {"type": kind}

    def _string(self, schema: Schema) -> dict[str, Any]:
        pattern, least, most = schema.get("pattern"), _count(schema, "minLength"), _most(schema, "maxLength")
        if pattern is not None and not isinstance(pattern, str):
            raise ValueError("pattern must be a string")
        lengths = {"minLength": least} if least else {}
        lengths |= {} if most is None else {"maxLength": most}
        if (pattern is not None) + bool(lengths) + ("format" in schema) > 1:
            raise ValueError("of pattern, lengths and format only one can be kept to")
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise ValueError(f"of formats only {', '.join(FORMATS)} can be kept to")
            return {"type": "string", "format": schema["format"]}
        return {"type": "string", **(lengths if pattern is None else {"pattern": self._named(pattern)})}

    def _array(self, schema: Schema, depth: int) -> dict[str, Any]:
        least, most = _count(schema, "minItems"), _most(schema, "maxItems")
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(first, list) or isinstance(rest, list):
            raise ValueError("prefixItems must be a list, items a schema")
        if most is not None and most < len(first):
            first, rest = first[:most], False
        if least > (len(first) if rest is False else least if most is None else most):
            raise ValueError("minItems is more than there may be")
        array: dict[str, Any] = {"type": "array", "minItems": least}
        if first:
            array["prefixItems"] = [self._any(item, depth + 1) for item in first]
        array["items"] = False if rest is False else self._any(rest, depth + 1)
        if most is not None and rest is not False:
            array["maxItems"] = most
        return array

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping):
            raise ValueError("properties must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError("required must be a list of names")
        missing = [name for name in dict.fromkeys(required) if name not in properties]
        wanted = {**properties, **dict.fromkeys(missing, others)}
        if len(wanted) > MOST_PROPERTIES:
            raise ValueError(f"it is over the limits: {MOST_PROPERTIES} properties of an object")
        new: dict[str, Any] = {"type": "object", **_limits_of_properties(schema, wanted)}
        new["properties"] = {name: self._any(value, depth + 1) for name, value in wanted.items()}
        new["required"] = [name for name in wanted if name in set(required)]
        new["additionalProperties"] = False if others is False else self._any(others, depth + 1)
        return new


def _number(kind: str, schema: Schema) -> dict[str, Any]:
    words = {word: schema[word] for word in sorted(_OF_NUMBERS) if word in schema}
    if not all(_is(value, "number") and math.isfinite(value) for value in words.values()):
        raise ValueError("limits of numbers must be numbers")
    multiple = words.pop("multipleOf", None)
    if multiple is None:
        return {"type": kind, **(_whole_limits(words) if kind == "integer" else words)}
    if kind == "number" or words or multiple != int(multiple) or not 0 < multiple <= MOST_MULTIPLE:
        raise ValueError(f"multipleOf can be kept to alone, of integers, up to {MOST_MULTIPLE}")
    return {"type": "integer", "multipleOf": int(multiple)}


def _whole_limits(limits: Schema) -> dict[str, int]:
    """The same for integers, where a limit need not be one itself."""
    whole: dict[str, int] = {}
    for word, value in limits.items():
        excluded = word.startswith("exclusive")
        if word.lower().endswith("minimum"):
            least = math.floor(value) + 1 if excluded else math.ceil(value)
            whole["minimum"] = max(least, whole.get("minimum", least))
        else:
            most = math.ceil(value) - 1 if excluded else math.floor(value)
            whole["maximum"] = min(most, whole.get("maximum", most))
    return whole


def _limits_of_properties(schema: Schema, wanted: Schema) -> dict[str, int]:
    words = {word: _count(schema, word) for word in ("minProperties", "maxProperties") if word in schema}
    if words and wanted:
        raise ValueError(f"{next(iter(words))} cannot be kept to where properties are named")
    return words


def _either(several: list[dict[str, Any]]) -> dict[str, Any]:
    return several[0] if len(several) == 1 else {"anyOf": several}


def _exactly(value: Any) -> dict[str, Any]:
    """A schema of one value, written as every other one is."""
    if isinstance(value, dict):
        fields = {key: _exactly(field) for key, field in value.items()}
        return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    if isinstance(value, list):
        items = [_exactly(item) for item in value]
        first = {"prefixItems": items} if items else {}
        return {"type": "array", **first, "items": False, "minItems": len(items)}
    return {"enum": [value]}


def _types(schema: Schema) -> list[str]:
    """Those that may be, without integer where any number may."""
    given = schema.get("type", [kind for kind in TYPES if kind != "integer"])
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not kinds:
        raise ValueError("type must be a type or a list of types")
    for kind in kinds:
        if kind not in TYPES:
            raise ValueError(f"{str(kind)[:60]!r} is no type")
    return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
    return isinstance(value, dict)


def _alone(schema: Schema, word: str) -> Any:
    """What stands under ``word``, which may have notes beside it but nothing that restricts."""
    words = _OF_VALUES.union(("type", "$ref", "enum", "const", "allOf", "anyOf"))
    beside = words.intersection(schema) - {word}
    _refuse(sorted(beside), f"beside {word}")
    return schema[word]


def _refuse(words: Iterable[str], where: str = "") -> None:
    for word in words:
        raise ValueError(f"{word} {where} cannot be kept to" if where else f"{word} cannot be kept to")


def _found(root: Any, pointer: str) -> Any:
    """What a JSON pointer (RFC 6901) tells in ``root``."""
    at = root
    for part in pointer[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, Mapping) or name not in at:
            raise ValueError(f"$ref {pointer[:100]!r} is nowhere")
        at = at[name]
    return at


def _count(schema: Schema, word: str) -> int:
    """The limit under ``word``, 0 where there is none."""
    value = schema.get(word, 0)
    if not _is(value, "integer") or value < 0:
        raise ValueError(f"{word} must be a number of at least 0")
    if value > MOST_COUNTED:
        raise ValueError(f"{word} is over the limit, {MOST_COUNTED}")
    return int(value)


def _most(schema: Schema, word: str) -> int | None:
    return _count(schema, word) if word in schema else None
