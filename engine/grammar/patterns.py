"""Patterns, read and written anew for a backend whose own reading of them differs from what was asked.

    pattern = branch {"|" branch}        branch = {atom [* + ? {n} {n,} {n,m}] ["?"]}
    atom    = character | escape | "." | [class] | (pattern) | (?:pattern)

What is written has only characters, groups, classes without negation, and repetitions.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, sorted and apart

MOST_WRITTEN = 2000  # characters and classes of a pattern
MOST_WORK = 128  # what counted repetitions may cost; see _Size

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_SETS = {"d": DIGITS, "w": WORD, "s": SPACE}
_CONTROLS = {"n": 0x0A, "t": 0x09, "r": 0x0D, "f": 0x0C, "v": 0x0B}
_JSON_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}


def sorted_ranges(ranges: Iterator[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """Those of ``ranges`` that are not in ``taken``."""
    left: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last in taken:
            if low < first <= high:
                left.append((low, first - 1))
            if first <= high and last >= low:
                low = max(low, last + 1)
        if low <= high:
            left.append((low, high))
    return tuple(left)


TEXT: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
JSON_TEXT = without(TEXT, ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)))  # what needs no escape
LINE = without(TEXT, ((0x0A, 0x0A),))


class _Size(NamedTuple):
    """How large a part of a pattern is when its counted repetitions are written out."""

    atoms: int = 0
    loose: int = 0  # repetitions whose number is not fixed

    def plus(self, other: "_Size") -> "_Size":
        return _Size(self.atoms + other.atoms, self.loose + other.loose)

    def times(self, most: int, *, loose: bool) -> "_Size":
        return _Size(self.atoms * most, self.loose * most + loose)


def whole(pattern: str) -> tuple[str, int]:
    """What matches texts that ``pattern`` matches from end to end, and what it costs, up to ``MOST_WORK``.
    ValueError says what is wrong with it, or cannot be kept to."""
    body, _, _ = _bare(pattern)
    reader = _Reader(body, TEXT, LINE, _character)
    return reader.read(), reader.work


def in_json(pattern: str) -> tuple[str, int]:
    """What matches the inside of JSON strings in which ``pattern`` matches a part, as JSON Schema has it. A
    class or a dot stands for no character that JSON must escape. Otherwise as ``whole``."""
    body, begins, ends = _bare(pattern)
    reader = _Reader(body, JSON_TEXT, JSON_TEXT, _escaped)
    text = reader.read()
    if reader.branches > 1 and begins != ends:
        raise ValueError("^ and $ must stand on both ends of alternatives, or around them in a group")
    if reader.branches > 1 and begins:
        raise ValueError("alternatives between ^ and $ must stand in a group: ^(?:a|b)$")
    anything = _class(JSON_TEXT) + "*"
    return ("" if begins else anything) + f"({text})" + ("" if ends else anything), reader.work


def _bare(pattern: str) -> tuple[str, bool, bool]:
    """The pattern without ^ and $ at its ends, and whether they stood there."""
    begins = pattern.startswith("^")
    body = pattern[1:] if begins else pattern
    slashes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
    ends = body.endswith("$") and slashes % 2 == 0
    return (body[:-1] if ends else body), begins, ends


def _escaped(code: int) -> str:
    """A character as a JSON string has it."""
    if escape := _JSON_ESCAPES.get(code):
        return "".join(_character(ord(c)) for c in escape)
    if not any(low <= code <= high for low, high in JSON_TEXT):
        raise ValueError(f"the character {code:#x} cannot stand in a pattern")
    return _character(code)


def _character(code: int) -> str:
    character = chr(code)
    if character.isascii() and not character.isalnum():
        return f"\\x{code:02x}"
    return character


def _class(ranges: Ranges) -> str:
    return "[" + "".join(_span(*ends) for ends in ranges) + "]"


def _span(low: int, high: int) -> str:
    return _character(low) if low == high else f"{_character(low)}-{_character(high)}"


class _Reader:
    """Reads a pattern once from left to right. ``allowed`` is what classes may stand for, ``dot`` what a dot
    does, ``write`` how one character is written."""

    def __init__(self, pattern: str, allowed: Ranges, dot: Ranges, write: Callable[[int], str]) -> None:
        self.branches = self.work = 0  # of the outermost pattern
        self._pattern, self._at = pattern, 0
        self._allowed, self._dot, self._write = allowed, dot, write
        self._written = 0

    def read(self) -> str:
        text, size, self.branches = self._alternatives()
        if self._at < len(self._pattern):
            self._refuse("unopened group")
        self.work = (size.atoms - self._written) * max(1, size.loose)
        if self._written > MOST_WRITTEN or self.work > MOST_WORK:
            raise ValueError(
                f"it is over the limits: {MOST_WRITTEN} characters, and {MOST_WORK} more when counted"
                " repetitions are written out, times those whose number is not fixed"
            )
        return text

    def _alternatives(self) -> tuple[str, _Size, int]:
        """Text, size, and number of branches."""
        text, size = self._branch()
        branches = 1
        while self._take("|"):
            more, its = self._branch()
            text, size, branches = f"{text}|{more}", size.plus(its), branches + 1
        return text, size, branches

    def _branch(self) -> tuple[str, _Size]:
        text, size = "", _Size()
        while self._peek() not in ("", "|", ")"):
            atom, its = self._atom()
            repeat, most, loose = self._repetition()
            text, size = text + atom + repeat, size.plus(its.times(most, loose=loose))
        return text, size

    def _atom(self) -> tuple[str, _Size]:
        character = self._next()
        if character == "(":
            return self._group()
        self._written += 1
        return self._single(character), _Size(1)

    def _single(self, character: str) -> str:
        if character == ".":
            return _class(self._dot)
        if character == "[":
            return _class(self._members())
        if character in "*+?{":
            self._refuse("repetition operator missing expression")
        if character in "^$":
            self._refuse(f"{character} in the middle cannot be kept to")
        found = self._escape() if character == "\\" else ord(character)
        return self._write(found) if isinstance(found, int) else _class(self._kept(found))

    def _group(self) -> tuple[str, _Size]:
        if self._peek() == "?" and not self._take("?:"):
            self._refuse("of groups that begin with (? only (?: can be kept to")
        text, size, _ = self._alternatives()
        if not self._take(")"):
            self._refuse("unclosed group")
        return f"({text})", size

    def _repetition(self) -> tuple[str, int, bool]:
        """How it is written, how many atoms it is when it is written out, and whether that may vary."""
        sign = self._peek()
        if not sign or sign not in "*+?{":
            return "", 1, False
        self._at += 1
        text, most, loose = self._counts() if sign == "{" else (sign, 1, True)
        self._take("?")  # lazy: the same texts
        if self._peek() and self._peek() in "*+?{":
            self._refuse("a repetition of a repetition must stand in a group")
        return text, most, loose

    def _counts(self) -> tuple[str, int, bool]:
        least = self._number()
        most: int | None = least
        if self._take(","):
            most = None if self._peek() == "}" else self._number()
        if not self._take("}"):
            self._refuse("unclosed counted repetition")
        if most is None:
            return f"{{{least},}}", least + 1, True
        if most < least:
            self._refuse("invalid repetition count range")
        return f"{{{least},{most}}}", max(1, most), most > least

    def _number(self) -> int:
        start = self._at
        while self._peek() in tuple("0123456789"):
            self._at += 1
        if not 0 < self._at - start <= 6:
            self._refuse("invalid repetition count")
        return int(self._pattern[start : self._at])

    def _members(self) -> Ranges:
        negated, ranges = self._take("^"), []
        while not self._take("]"):
            low = self._member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if not (isinstance(low, int) and isinstance(high, int) and low <= high):
                    self._refuse("invalid character class range")
                ranges.append((low, high))
            else:
                ranges += [(low, low)] if isinstance(low, int) else low
        found = sorted_ranges(iter(ranges))
        return self._kept(without(TEXT, found) if negated else found)

    def _member(self) -> int | Ranges:
        character = self._next("unclosed character class")
        if character == "[" or (character in "&~" and self._peek() == character):
            self._refuse("classes in classes cannot be kept to")
        return self._escape() if character == "\\" else ord(character)

    def _kept(self, ranges: Ranges) -> Ranges:
        kept = without(ranges, without(((0, 0x10FFFF),), self._allowed))
        if not kept:
            self._refuse("a class that no character fits")
        return kept

    def _escape(self) -> int | Ranges:
        """One character, or the set it stands for."""
        letter = self._next("a backslash at the end")
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter.lower() in _SETS:
            found = _SETS[letter.lower()]
            return found if letter.islower() else without(TEXT, found)
        if letter in "xu":
            return self._code(2 if letter == "x" else 4)
        if letter.isascii() and not letter.isalnum():
            return ord(letter)
        return self._refuse(f"the escape \\{letter} cannot be kept to")

    def _code(self, digits: int) -> int:
        text = self._pattern[self._at : self._at + digits]
        if len(text) < digits or not all(c in "0123456789abcdefABCDEF" for c in text):
            self._refuse("an escape of a code that is none")
        self._at += digits
        return int(text, 16)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self, otherwise: str = "unexpected end") -> str:
        character = self._peek()
        if not character:
            self._refuse(otherwise)
        self._at += 1
        return character

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"{reason}, before character {self._at + 1}")
