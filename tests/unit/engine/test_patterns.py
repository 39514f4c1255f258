"""Patterns are read and written anew: the same texts, or a refusal. Python's re is the judge."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.engine.grammar.patterns import MOST_WORK, in_json, whole

PATTERNS = [
    "[a-c]{2,5}-(red|blue)",
    "a.b",
    r"\d{2}\w+\s?",
    r"[^a]\W\D\S",
    r"[\w-]+|[a\-z]*",
    r"\.\*\/\(\[\]",
    "a|b|",
    "^(?:ab)+$",
    r"\t\n[\n\ta]",
    "x{0}a{2,}(a{0,3}){2}?",
    r"[\s\S]{1,3}",
    "[é-ü]+\\u00e9?",
    "^",
    "",
]
TEXTS = st.text(alphabet='abcxz019_-. \n\téüß"\\()[]/*red', max_size=8)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_rewritten_pattern_matches_the_same_whole_texts(pattern):
    ours, theirs = re.compile(whole(pattern)[0]), re.compile(pattern, re.ASCII)
    inside = re.compile(in_json(pattern)[0])
    hits = []

    @given(st.one_of(st.from_regex(theirs, fullmatch=True), TEXTS))
    def the_same(text):
        hits.append(bool(theirs.fullmatch(text)))
        assert bool(ours.fullmatch(text)) == bool(theirs.fullmatch(text))
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        if inside.fullmatch(written):
            assert theirs.search(text)

    the_same()
    assert any(hits)


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("a+b", ["aab", "xaby"], ["ba", 'ab"', "ab\\", "ab\n"]),
        ("^[a-z]{2}", ["ab", "abC d"], ["a", "1ab"]),
        ("[a-z]$", ["1a"], ["a1"]),
        ("^.$", ["é", "x"], ['"', "\\", "\n", "\x7f", "xx"]),
        ('^"a$', ['\\"a'], ['"a', "a"]),
        ("^a\\\\\\n$", ["a\\\\\\n"], ["a\\n", "a\n"]),
        ("^[^é]$", ["a"], ["é", '"', "\x13"]),
    ],
)
def test_in_a_string_a_pattern_is_found_anywhere_and_what_json_escapes_is_escaped(pattern, fits, does_not):
    ours = re.compile(in_json(pattern)[0])
    assert all(ours.fullmatch(text) for text in fits)
    assert not any(ours.fullmatch(text) for text in does_not)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "unclosed group"),
        (")", "unopened group"),
        ("[a", "unclosed character class"),
        ("a{3,2}", "count range"),
        ("a{1", "unclosed counted"),
        ("*a", "operator missing"),
        ("a**", "must stand in a group"),
        ("a^b", "middle"),
        ("a$b", "middle"),
        ("(?i)a", "only"),
        ("(?=a)", "only"),
        (r"\bа", "escape"),
        (r"\p{L}", "escape"),
        (r"(a)\1", "escape"),
        ("[[:alpha:]]", "classes in classes"),
        ("[a&&b]", "classes in classes"),
        ("[z-a]", "range"),
        ("a\\", "end"),
        (r"\u00g0", "code"),
        ("a{1000}", "limits"),
        ("([a-z]?){1,32}", "limits"),
        ("(.{1,8}.{1,8}){1,2}", "limits"),
        ("(((a{1,900}){1,900}){1,900}){1,900}b{5000}", "limits"),
        ("ab" * 1500, "limits"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_with_its_reason(pattern, reason):
    for rewrite in (whole, in_json):
        with pytest.raises(ValueError, match=reason):
            rewrite(pattern)


def test_alternatives_between_anchors_are_refused_in_strings_unless_grouped():
    with pytest.raises(ValueError, match="group"):
        in_json("^a|b$")
    assert re.fullmatch(in_json("^(?:a|b)$")[0], "b")


def test_what_a_pattern_costs_is_told():
    assert whole("abc")[1] == 0
    assert whole("[a-z]{3,80}")[1] == 79
    assert whole(r"\d{1,3}\.\d{1,3}")[1] == 8
    assert whole(f"a{{{MOST_WORK + 1}}}")[1] == MOST_WORK
