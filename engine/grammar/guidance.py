"""Structured output by llguidance: lazily computed masks, so that compiling takes milliseconds."""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import llguidance
import numpy as np

from mmserve.core.errors import InvalidGrammar
from mmserve.core.messages import Grammar
from mmserve.engine.grammar.base import JSON_FORM, BitRow, GrammarFault

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON = cast("JsonCompileOptions", JSON_FORM)


class GuidanceBackend:
    """``tokenizer_json`` is the content of tokenizer.json, ``vocab`` the width of the logits."""

    name = "llguidance"

    def __init__(self, tokenizer_json: str, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=sorted(eos_ids))

    def compile(self, grammar: Grammar) -> "GuidanceMatcher":
        """llguidance's own limits bound the size of a grammar and the work of a step."""
        try:
            source = _SOURCES[grammar.kind](grammar.source)
        except ValueError as error:
            raise _refused(grammar, str(error)) from None
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        if not self._can_begin(matcher):
            raise _refused(grammar, "no text can begin it, or its first step is over the limits")
        return GuidanceMatcher(matcher)

    def _can_begin(self, matcher: llguidance.LLMatcher) -> bool:
        """Whether any token may come first, or the end. A definition that only refers to itself has none."""
        row = np.zeros(-(-self._tokenizer.vocab_size // 32), np.int32)
        try:
            GuidanceMatcher(matcher.deep_copy()).fill(row)
        except GrammarFault:
            return False
        return bool(row.any())


class GuidanceMatcher:
    """``Matcher`` over an ``LLMatcher``, which has no exceptions but a state of error that stays."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def free(self) -> bool:
        return False  # the end must come from the grammar too

    def fill(self, row: BitRow) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> "GuidanceMatcher":
        """Another one in the same state; what was computed for the grammar is shared."""
        return GuidanceMatcher(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFault(_told(self._matcher.get_error()))


def _choice(source: str) -> str:
    """``source`` is a JSON list of the strings to choose from."""
    options = " | ".join(json.dumps(option) for option in json.loads(source))
    return str(llguidance.LLMatcher.grammar_from_lark(f"start: {options}"))


_SOURCES: dict[str, Callable[[str], str]] = {
    "json_object": lambda _: llguidance.LLMatcher.grammar_from_json_schema(
        {"type": "object"}, overrides=_JSON
    ),
    "json_schema": lambda s: llguidance.LLMatcher.grammar_from_json_schema(s, overrides=_JSON),
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": llguidance.LLMatcher.grammar_from_lark,
}


def _refused(grammar: Grammar, reason: str) -> InvalidGrammar:
    what = grammar.kind.replace("_", " ")
    return InvalidGrammar(f"the {what} cannot be used: {_told(reason)}", param=grammar.param)


def _told(reason: str) -> str:
    """In one line, without the state of the library that stands behind it."""
    return " ".join(reason.partition("<state>")[0].split())[:300]
