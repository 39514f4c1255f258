"""Calls of tools in what a model says, in Qwen's two forms.

Hermes, JSON inside tags (Qwen2.5, Qwen3, Qwen3-VL), and Coder, tags all through (Qwen3-Coder, Qwen3.5)::

    <tool_call>                                    <tool_call>
    {"name": "f", "arguments": {"x": 1}}           <function=f>
    </tool_call>                                   <parameter=x>
                                                   1
                                                   </parameter>
                                                   </function>
                                                   </tool_call>

The text shows which form it is. What turns out to be no call is text again, to the last character.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from typing import TypeVar

from mmserve.parsing.argument_types import Schema, json_text, types_of
from mmserve.parsing.events import CallArguments, CallBegin, CallBroken, CallEnd, Content, Event
from mmserve.parsing.incremental import Incremental, Steps, held
from mmserve.parsing.json_object import ObjectScanner, compact, strict

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_VALUE_ENDS = (_END_PARAMETER, "\n" + _END_PARAMETER)
_STRING = frozenset({"string"})

Found = TypeVar("Found")
Reading = Generator[Event | None, None, Found]

# White space is bounded, so that no text, however it is cut, is looked through again and again.
_GAP = r"\s{0,64}+"
_HEAD = re.compile(r'\{ "name" : "((?:[^"\\]|\\.){1,256})" , "arguments" : (?=\{)'.replace(" ", _GAP))
_NAMED = re.compile(r"(?:<function=|<parameter=)([^<>\n]{1,256})>")
# A value may hold the closing tag; that one ends it which another tag of the call follows.
_VALUE_END = re.compile(rf"\n?{_END_PARAMETER}{_GAP}(?={_PARAMETER}|{_END_FUNCTION}|{CLOSE})")
_VALUE_END_BEGUN = re.compile(rf"\n?{_END_PARAMETER}{_GAP}(?:<[/a-z_=]{{0,12}})?\Z")


class _NotACall(Exception):
    """What is being read is no call, though it may have been given out as one."""


class ToolParser(Incremental):
    """Tells calls from content. ``tools`` are the parameters' JSON schemas by the tools' names, which say of
    what type the arguments in the Coder form are.

    White space between a call and the edge of the answer, or between calls, is layout and is dropped.
    """

    def __init__(self, tools: Mapping[str, Schema]) -> None:
        super().__init__()
        self._tools = tools
        self._calls = 0  # begun so far
        self._raw: list[str] = []  # what was taken of the call that is being read
        self._gap = ""  # white space that is content only if more content follows
        self._said = self._after_call = False

    def _read(self) -> Steps:
        while not (self._ended and not self._buffer):
            at = self._buffer.find(OPEN)
            yield from self._say(self._take(at if at >= 0 else self._surely_content()))
            if at >= 0:
                yield from self._call()
            elif not self._ended:
                yield None
        if self._gap and not self._after_call:
            yield Content(self._gap)

    # ------------------------------------------------------------ content

    def _surely_content(self) -> int:
        return len(self._buffer) - (0 if self._ended else held(self._buffer, OPEN))

    def _say(self, text: str) -> Iterator[Event]:
        text = self._gap + text
        if self._after_call and not self._said:
            text = text.lstrip()
        content = text.rstrip()
        self._gap = text[len(content) :]
        if content:
            self._said, self._after_call = True, False
            yield Content(content)

    # ------------------------------------------------------------ one call

    def _call(self) -> Steps:
        """From its opening tag to its end, or to where it shows that it is none."""
        self._raw = []
        self._record(len(OPEN))
        begun = self._calls
        try:
            yield from self._form()
        except _NotACall:
            raw = "".join(self._raw)
            if self._calls > begun:
                yield CallBroken(begun)
                yield from self._say(raw)
            else:
                self._buffer = raw[len(OPEN) :] + self._buffer
                yield from self._say(OPEN)
        else:
            self._after_call = True
            if not self._said:
                self._gap = ""
            yield CallEnd(begun)

    def _form(self) -> Steps:
        yield from self._skip_space()
        while len(self._buffer) < len(_FUNCTION) and _FUNCTION.startswith(self._buffer):
            yield from self._more()
        if self._buffer.startswith("{"):
            yield from self._hermes()
        elif self._buffer.startswith(_FUNCTION):
            yield from self._coder()
        else:
            raise _NotACall

    def _begin(self, name: str) -> Event:
        self._calls += 1
        return CallBegin(self._calls - 1, name)

    def _say_arguments(self, text: str) -> Iterator[Event]:
        if text:
            yield CallArguments(self._calls - 1, text)

    # ------------------------------------------------------------ Hermes

    def _hermes(self) -> Steps:
        scanner, scanned, whole = ObjectScanner(), 0, ""
        while not (head := _HEAD.match(self._buffer)):
            piece, length = scanner.read(self._buffer[scanned:])
            whole, scanned = whole + piece, scanned + length
            if scanner.failed:
                raise _NotACall
            if scanner.closed:
                yield from self._whole_object(whole, scanned)
                break
            yield from self._more()
        else:
            yield self._begin(_name(head[1]))
            self._record(head.end())
            yield from self._streamed_object()
        yield from self._tail(*("}" if head else ""))

    def _whole_object(self, text: str, length: int) -> Steps:
        """A call whose name does not come first, or whose arguments are no object."""
        name, arguments = _name_and_arguments(text)
        self._record(length)
        yield self._begin(name)
        yield from self._say_arguments(arguments)

    def _streamed_object(self) -> Steps:
        scanner = ObjectScanner()
        while not scanner.closed:
            if not self._buffer:
                yield from self._more()
            piece, length = scanner.read(self._buffer)
            self._record(length)
            yield from self._say_arguments(piece)
            if scanner.failed:
                raise _NotACall

    # ------------------------------------------------------------ Coder

    def _coder(self) -> Steps:
        name = yield from self._tag_name()
        yield self._begin(name)
        parameters, before = self._tools.get(name, {}), "{"
        while (yield from self._another_parameter()):
            key = yield from self._tag_name()
            yield from self._say_arguments(f"{before}{compact(key)}: ")
            yield from self._value(types_of(parameters, key))
            before = ", "
        yield from self._say_arguments("}" if before == ", " else "{}")
        yield from self._tail(_END_FUNCTION)

    def _tag_name(self) -> Reading[str]:
        """The name in the tag at the buffer's start, which is taken."""
        while not (tag := _NAMED.match(self._buffer)):
            if "\n" in self._buffer or ">" in self._buffer:
                raise _NotACall
            yield from self._more()
        self._record(tag.end())
        if not tag[1].strip():
            raise _NotACall
        return tag[1].strip()

    def _another_parameter(self) -> Reading[bool]:
        """Whether a parameter follows, and not the end of the call."""
        while True:
            yield from self._skip_space()
            if self._buffer.startswith(_PARAMETER):
                return True
            if self._buffer.startswith((_END_FUNCTION, CLOSE)):
                return False
            if not any(tag.startswith(self._buffer) for tag in (_PARAMETER, _END_FUNCTION, CLOSE)):
                raise _NotACall
            yield from self._more()

    def _value(self, types: frozenset[str]) -> Steps:
        """A value as JSON: a string as it comes, anything else when it is whole."""
        while not self._buffer:
            yield from self._more()
        if self._buffer.startswith("\n"):
            self._record(1)
        plain, pieces = types == _STRING, []
        if plain:
            yield from self._say_arguments('"')
        while not (end := _VALUE_END.search(self._buffer)):
            piece = self._record(self._surely_value())
            if plain:
                yield from self._say_arguments(_escaped(piece))
            pieces.append(piece)
            yield from self._more()
        pieces.append(self._buffer[: end.start()])
        self._record(end.end())
        if plain:
            yield from self._say_arguments(_escaped(pieces[-1]) + '"')
        else:
            yield from self._say_arguments(json_text("".join(pieces), types))

    def _surely_value(self) -> int:
        """How much of the buffer is the value's, whatever comes next."""
        begun = _VALUE_END_BEGUN.search(self._buffer)
        if begun:
            return begun.start()
        return len(self._buffer) - max(
            held(self._buffer, tag) for tag in (_END_PARAMETER, "\n" + _END_PARAMETER)
        )

    # ------------------------------------------------------------ reading

    def _tail(self, *closings: str) -> Steps:
        """Take what closes a call. All that matters is said: a model that forgets a tag is forgiven."""
        for closing in (*closings, CLOSE):
            yield from self._skip_space(to_the_end=True)
            while self._buffer != closing and closing.startswith(self._buffer) and not self._ended:
                yield None
            if self._buffer.startswith(closing):
                self._record(len(closing))

    def _skip_space(self, to_the_end: bool = False) -> Steps:
        """Take white space up to something else; an end in its place is no call, unless ``to_the_end``."""
        while True:
            self._record(len(self._buffer) - len(self._buffer.lstrip()))
            if self._buffer or (to_the_end and self._ended):
                return
            yield from self._more()

    def _more(self) -> Steps:
        """Wait for more text; without it there is no call."""
        if self._ended:
            raise _NotACall
        yield None

    def _record(self, count: int) -> str:
        """Take ``count`` characters of the call; they are kept until it is known to be one."""
        self._raw.append(self._take(count))
        return self._raw[-1]


def _name(literal: str) -> str:
    """The name between quotes."""
    try:
        name = strict(f'"{literal}"')
    except ValueError:
        raise _NotACall from None
    return str(name)


def _name_and_arguments(text: str) -> tuple[str, str]:
    """Of a whole object; arguments may be missing, or be a string that holds them as JSON."""
    try:
        call = strict(text)
        arguments = call.get("arguments")
        if isinstance(arguments, str):
            arguments = strict(arguments)
    except ValueError:
        raise _NotACall from None
    name = call.get("name")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise _NotACall
    return name, compact(arguments or {})


def _escaped(text: str) -> str:
    """As inside a JSON string."""
    return compact(text)[1:-1]
