"""Calls of tools in earlier answers, on their way back to the model."""

from collections.abc import Mapping
from typing import Any

from mmserve.core.errors import InvalidRequest
from mmserve.parsing.json_object import strict


def template_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The ``tool_calls`` of an earlier answer as templates take them: arguments as values, not as their text.

    InvalidRequest names the call that is wrong.
    """
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list of calls", param=where)
    return [_template_call(call, f"{where}[{i}].function") for i, call in enumerate(calls)]


def call_arguments(given: Any, where: str) -> dict[str, Any]:
    """The arguments of a call, given as an object or as its JSON text; InvalidRequest if they are neither."""
    value = given or {}
    if isinstance(value, str):
        try:
            value = strict(value)
        except ValueError as error:
            raise InvalidRequest(f"{where} is not JSON: {error}", param=where) from None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    return dict(value)


def _template_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with a name", param=where)
    arguments = call_arguments(function.get("arguments"), f"{where}.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
