"""Structured output by xgrammar. Imported only where ``grammar_backend`` asks for it.

xgrammar reads some words of schemas and patterns in its own way and lets others pass with a line on stderr.
``schemas.py`` and ``patterns.py`` therefore write anew what it keeps exactly, and refuse the rest. It has no
limit on the work of a step: sizes are bounded before, and a step that takes too long ends its request.
"""

import json
import re
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np
import xgrammar

from mmserve.core.errors import InvalidGrammar
from mmserve.core.messages import Grammar
from mmserve.engine.detokenizer import TokenBytes
from mmserve.engine.grammar.base import JSON_SEPARATORS, BitRow, GrammarFault
from mmserve.engine.grammar.patterns import MOST_WORK, in_json, whole
from mmserve.engine.grammar.schemas import MOST_OPTIONS, Rewriting

STEP_S = 0.5  # of one thread's own time, for a mask or a token; well-behaved forms take some 0.0001
# How xgrammar prints the pattern of a string; ours are numbers, by which what it stands for is put in place.
_PLACE = re.compile(r'^(\w+) ::= Regex\("%(\d+)%", json_string=true\)$', re.MULTILINE)
# How it prints the rule of one character of a string that has a length: control characters, too.
_CHARACTER = re.compile(r'^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
_UNESCAPED = r"(([^\"\\\0-\x1f\x7f]))"  # patterns.JSON_TEXT
_COUNTED = re.compile(r"^\w+_characters\w* ::=", re.MULTILINE)
_UNPLACED = re.compile(r"true\)$", re.MULTILINE)
_AUTOMATON = "::= Regex("
MOST_WORK_OF_ALL = 2 * MOST_WORK  # of all patterns of a form
_ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")  # what stands before its messages


class XGrammarBackend:
    """``tokenizer_json`` is the content of tokenizer.json, ``vocab`` the width of the logits."""

    name = "xgrammar"

    def __init__(self, tokenizer_json: str, vocab: int, eos_ids: Iterable[int]) -> None:
        self._ends = sorted(eos_ids)
        self._width = -(-vocab // 32)
        info = xgrammar.TokenizerInfo(
            _spellings(tokenizer_json, vocab), vocab_size=vocab, stop_token_ids=self._ends
        )
        self._eager, self._lazy = (
            xgrammar.GrammarCompiler(
                info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=dynamic
            )
            for dynamic in (False, True)
        )

    def compile(self, grammar: Grammar) -> "XGrammarMatcher":
        """The masks of an automaton are made at once, one of which may take 0.2 s; those of other rules when
        they are met, in milliseconds and once for all answers: all of them may take half a minute."""
        try:
            text = _SOURCES[grammar.kind](grammar.source)
            lazy = grammar.kind.startswith("json") and _AUTOMATON not in text
            compiler = self._lazy if lazy else self._eager
            compiled = compiler.compile_grammar(text)
            matcher = XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._ends, self._width)
            if not matcher.row().any():
                raise ValueError("no text can begin it")
        except (ValueError, RuntimeError, GrammarFault) as error:
            raise _refused(grammar, str(error)) from None
        return matcher


class XGrammarMatcher:
    """``Matcher`` over a ``GrammarMatcher``, whose masks include the stop tokens wherever a text may end."""

    def __init__(self, matcher: "xgrammar.GrammarMatcher", ends: list[int], width: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._width = width
        self._row: BitRow | None = None  # of this state, once it is known
        self._fault: str | None = None
        self._only_ends = np.zeros(width, np.int32)
        for token in ends:
            self._only_ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    @property
    def complete(self) -> bool:
        """Asked after each token; the mask that tells it is needed for the next one anyway."""
        if not self._matcher.is_completed():
            return False
        try:
            return bool((self.row() == self._only_ends).all())
        except GrammarFault:
            return False  # it stays, and is told by ``fill``

    @property
    def free(self) -> bool:
        return False  # the end must come from the grammar too

    def row(self) -> BitRow:
        """The mask of this state. GrammarFault when it takes too long."""
        if self._row is None:
            row = np.zeros(self._width, np.int32)
            if self._matcher.is_terminated():
                row[:] = self._only_ends
            else:
                self._work(lambda: self._matcher.fill_next_token_bitmask(row.reshape(1, -1)))
            self._row = row
        return self._row

    def fill(self, row: BitRow) -> None:
        row[:] = self.row()

    def accept(self, token: int) -> None:
        if self._matcher.is_terminated() and token in self._ends:
            return
        if not self._work(lambda: self._matcher.accept_token(token)):
            self._fail(f"token {token} is not allowed by the grammar")
        self._row = None

    def copy(self) -> "XGrammarMatcher":
        """Another one in the same state; what was compiled for the grammar is shared."""
        twin = XGrammarMatcher(self._matcher.fork(), self._ends, self._width)
        twin._row, twin._fault = self._row, self._fault
        return twin

    def _work(self, work: Callable[[], bool]) -> bool:
        if self._fault is not None:
            raise GrammarFault(self._fault)
        start = time.thread_time()
        try:
            done = work()
        except RuntimeError as error:
            self._fail(_told(str(error)))
        if time.thread_time() - start > STEP_S:
            self._fail(f"a step of the grammar took over {STEP_S} s, the limit")
        return done

    def _fail(self, reason: str) -> NoReturn:
        """A fault stays: nothing that is asked later has an answer."""
        self._fault, self._row = reason, None
        raise GrammarFault(reason)


def _spellings(tokenizer_json: str, vocab: int) -> list[bytes]:
    """What each token spells; nothing for added ones, which no form of text may use."""
    tokens = TokenBytes.from_json(tokenizer_json)
    added = {token["id"] for token in json.loads(tokenizer_json)["added_tokens"]}
    return [b"" if token in added else tokens.raw(token) for token in range(vocab)]


# ---------------------------------------------------------------- sources, in xgrammar's EBNF


def _schema(source: str) -> str:
    patterns: list[str] = []  # as the right sides of rules
    work = 0

    def named(pattern: str) -> str:
        nonlocal work
        inside, its = in_json(pattern)
        patterns.append(_regex(inside))
        work += its
        if work > MOST_WORK_OF_ALL:
            raise ValueError(f"its patterns are over the limits together, {MOST_WORK_OF_ALL}")
        return f"%{len(patterns) - 1}%"

    try:
        schema = Rewriting(json.loads(source), named).whole()
    except RecursionError:
        raise ValueError("recursion: it is nested too deep") from None
    read = xgrammar.Grammar.from_json_schema(
        json.dumps(schema), any_whitespace=False, separators=JSON_SEPARATORS, strict_mode=False
    )
    printed = str(read)
    text = _PLACE.sub(lambda place: f"{place[1]} ::= {patterns[int(place[2])]}", printed)
    text, counted = _CHARACTER.subn(lambda rule: rule[1] + _UNESCAPED, text)
    if counted != len(_COUNTED.findall(printed)) or _UNPLACED.search(text):
        raise RuntimeError("this version of xgrammar prints strings in another way")
    return text


def _regex(pattern: str) -> str:
    """A pattern as an automaton: unlike alternatives of rules it is made deterministic, so that no step takes
    longer than another."""
    return f"Regex({_literal(pattern)})" if pattern else '""'


def _choice(source: str) -> str:
    """``source`` is a JSON list of the strings to choose from."""
    options = json.loads(source)
    if len(options) > MOST_OPTIONS:
        raise ValueError(f"it is over the limits: {MOST_OPTIONS} options")
    return "root ::= " + " | ".join(map(_literal, options))


def _literal(text: str) -> str:
    return '"' + "".join(c if c.isalnum() or c == " " else f"\\U{ord(c):08x}" for c in text) + '"'


def _lark(_: str) -> str:
    raise ValueError(
        "what is in Lark's notation, as a grammar and the calls of tools that must be made or are strict,"
        " needs a server with grammar_backend guidance"
    )


_SOURCES: dict[str, Callable[[str], str]] = {
    "json_object": lambda _: _schema('{"type": "object"}'),
    "json_schema": _schema,
    "regex": lambda pattern: f"root ::= {_regex(whole(pattern)[0])}",
    "choice": _choice,
    "grammar": _lark,
}


def _refused(grammar: Grammar, reason: str) -> InvalidGrammar:
    what = grammar.kind.replace("_", " ")
    return InvalidGrammar(f"the {what} cannot be used: {_told(reason)}", param=grammar.param)


def _told(reason: str) -> str:
    return " ".join(_ORIGIN.sub("", reason).split())[:300]
