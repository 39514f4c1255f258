"""The tools of a request, checked: what the model may call, and what it must."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from msgspec import Struct

from mmserve.core.errors import InvalidRequest
from mmserve.parsing.argument_types import Schema
from mmserve.parsing.json_object import DEEPEST, too_deep

MOST_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

Choice = Literal["none", "auto", "required"]


class Tool(Struct, frozen=True):
    """``parameters`` is the JSON schema of an object. ``strict``: the arguments must be of that schema."""

    name: str
    parameters: Schema
    strict: bool = False


class Toolbox(Struct, frozen=True):
    """What may be called. ``choice`` "none" is no tool, "required" at least one, of those in ``callable``.

    ``shown`` is what the chat template gets as its ``tools``, as the caller wrote it.
    """

    tools: tuple[Tool, ...] = ()
    choice: Choice = "none"
    named: str | None = None
    parallel: bool = True
    shown: tuple[Mapping[str, Any], ...] = ()

    @property
    def callable(self) -> tuple[Tool, ...]:
        if self.choice == "none":
            return ()
        return tuple(t for t in self.tools if self.named in (None, t.name))

    @property
    def schemas(self) -> dict[str, Schema] | None:
        """The parameters by name, as ``AnswerParser`` takes them; None if nothing may be called."""
        return {t.name: t.parameters for t in self.callable} or None


def read_toolbox(tools: Any, tool_choice: Any = None, parallel: bool | None = None) -> Toolbox:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat request; None is not given.

    InvalidRequest names the field that is wrong, e.g. ``tools[1].function.name``.
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            _refuse("tool_choice", "tool_choice needs tools to choose from")
        return Toolbox()
    if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MOST_TOOLS:
        _refuse("tools", f"tools must be a list of at most {MOST_TOOLS} tools")
    known = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in known]
    for number, name in enumerate(names):
        if name in names[:number]:
            where = f"tools[{number}].function.name"
            _refuse(where, f"{where}: there are two tools named {name}")
    choice, named = _choice(tool_choice, names)
    return Toolbox(known, choice, named, parallel is not False, tuple(tools))


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        _refuse(where, f"{where} must be an object")
    if tool.get("type", "function") != "function":
        _refuse(f"{where}.type", f"{where}.type must be function")
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, Mapping):
        _refuse(where, f"{where} must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        _refuse(f"{where}.name", f"{where}.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -")
    for field, kind in (("description", str), ("strict", bool)):
        if not isinstance(function.get(field), kind | None):
            _refuse(f"{where}.{field}", f"{where}.{field} must be a {kind.__name__}")
    return Tool(
        name, _parameters(function.get("parameters"), f"{where}.parameters"), bool(function.get("strict"))
    )


def _parameters(schema: Any, where: str) -> Schema:
    if not schema and not isinstance(schema, str | list):
        return NO_PARAMETERS
    if not isinstance(schema, Mapping):
        _refuse(where, f"{where} must be a JSON schema")
    if schema.get("type", "object") != "object":
        _refuse(f"{where}.type", f"{where}.type must be object: arguments have names")
    if too_deep(schema):
        _refuse(where, f"{where} is nested more than {DEEPEST} deep")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not all(
        isinstance(p, Mapping | bool) for p in properties.values()
    ):
        _refuse(f"{where}.properties", f"{where}.properties must be an object of JSON schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{where}.required", f"{where}.required must be a list of names")
    return {**schema, "type": "object"}


def _choice(choice: Any, names: Sequence[str]) -> tuple[Choice, str | None]:
    if choice is None:
        return "auto", None
    if choice in CHOICES:
        return choice, None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None or choice.get("type", "function") != "function":
        _refuse(
            "tool_choice", f"tool_choice must be {', '.join(CHOICES)}, or an object that names a function"
        )
    if name not in names:
        _refuse(
            "tool_choice.function.name",
            f"tool_choice names a tool that is not among tools: {str(name)[:64]!r}",
        )
    return "required", name


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
