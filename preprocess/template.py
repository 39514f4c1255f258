"""The model's own chat template, rendered in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmserve.core.errors import InvalidRequest, ModelLoadError
from mmserve.core.messages import Message, Part, TextPart
from mmserve.preprocess.tokenizer import Marker

# What running a template on a caller's values may raise; RuntimeError is nesting that is too deep.
REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)


class ChatTemplate:
    """Messages to the prompt's text. Templates come with a model and are not trusted."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template is not valid: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        marker: Marker,
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; every string of the caller's has gone through ``marker``.

        A message of one text part is given to the template as a string, any other as a list of parts
        in their order. InvalidRequest when the template refuses the conversation.
        """
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        try:
            values.update(marker.tree(dict(kwargs or {})))
            values["messages"] = [_plain(m, marker) for m in messages]
            values["add_generation_prompt"] = add_generation_prompt
            return self._template.render(values)
        except REFUSALS as error:
            said = marker.clean(str(error)) or type(error).__name__
            raise InvalidRequest(f"the model's chat template refused: {said}", param="messages") from None


def _plain(message: Message, marker: Marker) -> dict[str, Any]:
    fields = {k: marker.tree(v) for k, v in message.extra.items() if v is not None}
    return {"role": marker.text(message.role), "content": _content(message.content, marker), **fields}


def _content(parts: tuple[Part, ...], marker: Marker) -> str | list[dict[str, str]]:
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return marker.text(parts[0].text)
    return [_part(p, marker) for p in parts]


def _part(part: Part, marker: Marker) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": marker.text(part.text)}
    return {"type": str(part.__struct_config__.tag)}


# ---------------------------------------------------------------- what templates may use


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
