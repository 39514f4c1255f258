"""Where a JSON object ends, found while it comes."""

import json
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

_SPACE = " \t\n\r"
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_WORD_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}
DEEPEST = 256  # brackets; what a reader nests deeper would fail to read


class Expected(Enum):
    """What may come next, beside white space where it may stand."""

    VALUE = "a value"
    FIRST_VALUE = "a value or the end of the array"
    KEY = "a key"
    FIRST_KEY = "a key or the end of the object"
    COLON = "a colon"
    COMMA = "a comma or the end"
    WORD = "more of a number or literal, or what follows it"
    STRING = "more of a string"
    ESCAPE = "what is escaped"
    HEX = "a hexadecimal digit"


_VALUES = (Expected.VALUE, Expected.FIRST_VALUE)
_KEYS = (Expected.KEY, Expected.FIRST_KEY)
_STRINGS = (Expected.STRING, Expected.ESCAPE, Expected.HEX)
_ENDS = (Expected.COMMA, Expected.FIRST_VALUE, Expected.FIRST_KEY)


class ObjectScanner:
    """Follows one JSON object from its opening brace to the closing one: then it is ``closed``. At the first
    character that cannot belong to it, it has ``failed``.

    Line breaks and other control characters inside strings, which JSON forbids and models write, are
    escaped.
    """

    def __init__(self) -> None:
        self.closed = self.failed = False
        self._expected = Expected.VALUE
        self._open: list[str] = []  # brackets
        self._word = ""
        self._is_key = False  # the string that is being read
        self._digits = 0  # that a \\u still needs

    def read(self, text: str) -> tuple[str, int]:
        """What ``text`` adds to the object, and how many of its characters that took."""
        taken: list[str] = []
        for number, character in enumerate(text):
            said = self._step(character)
            if self.failed:
                return "".join(taken), number
            taken.append(said)
            if self.closed:
                return "".join(taken), number + 1
        return "".join(taken), len(text)

    def _step(self, character: str) -> str:
        if self._expected in _STRINGS:
            return self._quoted(character)
        if self._expected is Expected.WORD:
            if character in _WORD_CHARACTERS:
                self._word += character
                return character
            self.failed = not _WORD.fullmatch(self._word)
            self._expected = Expected.COMMA
        if character not in _SPACE:
            self._structure(character)
        return character

    def _quoted(self, character: str) -> str:
        if self._expected is Expected.HEX:
            self._digits -= 1
            self._expected = Expected.HEX if self._digits else Expected.STRING
            self.failed = character not in _HEX
        elif self._expected is Expected.ESCAPE:
            self._digits = 4
            self._expected = Expected.HEX if character == "u" else Expected.STRING
            self.failed = character not in '"\\/bfnrtu'
        elif character == "\\":
            self._expected = Expected.ESCAPE
        elif character == '"':
            self._expected = Expected.COLON if self._is_key else Expected.COMMA
        elif character < " ":
            return json.dumps(character)[1:-1]
        return character

    def _structure(self, character: str) -> None:
        expected = self._expected
        if character == '"' and expected in (*_VALUES, *_KEYS):
            self._is_key, self._expected = expected in _KEYS, Expected.STRING
        elif character in _CLOSING and expected in _VALUES and len(self._open) < DEEPEST:
            self._open.append(character)
            self._expected = Expected.FIRST_KEY if character == "{" else Expected.FIRST_VALUE
        elif expected in _ENDS and character == _CLOSING[self._open[-1]]:
            self._open.pop()
            self._expected, self.closed = Expected.COMMA, not self._open
        elif character == "," and expected is Expected.COMMA:
            self._expected = Expected.KEY if self._open[-1] == "{" else Expected.VALUE
        elif character == ":" and expected is Expected.COLON:
            self._expected = Expected.VALUE
        elif character in _WORD_CHARACTERS and expected in _VALUES:
            self._word, self._expected = character, Expected.WORD
        else:
            self.failed = True


def strict(text: str) -> Any:
    """The value of a JSON text; ValueError for anything that is not JSON, as NaN."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than DEEPEST in each other."""
    layer = list(_nests([value]))
    for _ in range(DEEPEST):
        layer = [nest for one in layer for nest in _nests(one.values() if isinstance(one, dict) else one)]
    return bool(layer)


def _nests(values: Iterable[Any]) -> Iterable[Any]:
    return (value for value in values if isinstance(value, dict | list))


def compact(value: Any) -> str:
    """As the models' templates write JSON, and as readable as it was said."""
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
