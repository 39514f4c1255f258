"""A grammar that keeps an answer to calls of tools, in the form that the model was taught."""

import json
from collections.abc import Mapping
from enum import Enum

from mmserve.core.messages import Grammar
from mmserve.engine.grammar.base import JSON_FORM
from mmserve.parsing.argument_types import Schema, types_of
from mmserve.parsing.toolbox import Tool, Toolbox

_LINE = "\n"
_SHARED = ("$defs", "definitions")  # what a property's schema may refer to


class ToolForm(Enum):
    """How a model writes a call; see ``parsing.tools``."""

    HERMES = "hermes"
    CODER = "coder"

    @classmethod
    def of(cls, template: str) -> "ToolForm | None":
        """The form that a chat template teaches; None if it knows no tools."""
        if "<tool_call>" not in template:
            return None
        return cls.CODER if "<function=" in template else cls.HERMES


def tool_grammar(toolbox: Toolbox, form: ToolForm) -> Grammar | None:
    """What the answer must be: calls and nothing else where one is required; words and calls of the tools'
    schemas where one of them is strict; None where it is free."""
    tools = toolbox.callable
    if not tools or (toolbox.choice == "auto" and not any(tool.strict for tool in tools)):
        return None
    write = _hermes if form is ToolForm.HERMES else _coder
    rules = [
        _start(toolbox),
        f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
        "text: /(?s:.*)/",
    ]
    for number, tool in enumerate(tools):
        rules += write(tool, number)
    return Grammar("grammar", "\n".join(rules), param="tools")


def _start(toolbox: Toolbox) -> str:
    if toolbox.choice == "auto":
        return f"start: {'(text call)* text' if toolbox.parallel else 'text (call text)?'}"
    several = toolbox.parallel and toolbox.named is None
    return f"start: call ({_quoted(_LINE)} call)*" if several else "start: call"


# ---------------------------------------------------------------- {"name": ..., "arguments": {...}}


def _hermes(tool: Tool, number: int) -> list[str]:
    head, tail = _quoted(f'\n{{"name": "{tool.name}", "arguments": '), _quoted("}\n")
    return [
        f"call_{number}: <tool_call> {head} arguments_{number} {tail} </tool_call>",
        f"arguments_{number}: {_json(tool.parameters)}",
    ]


# ---------------------------------------------------------------- <function=...><parameter=...>


def _coder(tool: Tool, number: int) -> list[str]:
    rules = {key: f"value_{number}_{i}" for i, key in enumerate(tool.parameters.get("properties", {}))}
    given = [_parameter(key, rule, tool.parameters) for key, rule in rules.items()]
    head, tail = _quoted(f"\n<function={tool.name}>\n"), _quoted("</function>\n")
    call = f"call_{number}: <tool_call> {' '.join([head, *given, tail])} </tool_call>"
    return [call, *(_value(rule, key, tool.parameters) for key, rule in rules.items())]


def _parameter(key: str, rule: str, parameters: Schema) -> str:
    optional = "" if key in parameters.get("required", ()) else "?"
    return f"({_quoted(f'<parameter={key}>{_LINE}')} {rule} {_quoted(_LINE)}){optional}"


def _value(rule: str, key: str, parameters: Schema) -> str:
    """A value and the tag that closes it. Text may be anything up to the tag: what a schema asks of it but to
    be one of several cannot be held."""
    schema = parameters["properties"][key]
    closing = "\n</parameter>"
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    if options and all(isinstance(option, str) for option in options):
        return f"{rule}: ({' | '.join(map(_quoted, options))}) {_quoted(closing)}"
    types = types_of(parameters, key)
    if not types or "string" in types:
        return f"{rule}[suffix={_quoted(closing)}]: /(?s:.*)/"
    shared = {word: parameters[word] for word in _SHARED if word in parameters}
    return f"{rule}: {_json({**schema, **shared})} {_quoted(closing)}"


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_FORM})}"


def _quoted(text: str) -> str:
    return json.dumps(text)
