"""The end of an object is found, and whether it is one, character by character."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.parsing.json_object import DEEPEST, ObjectScanner, strict, too_deep

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MARKS = st.sampled_from([*'{}[]",:\\ \n0123456789.-+eEtrufalsn', '"a"', "\\u00e9", "true", "-1.5e3"])


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.sampled_from([None, 1]), st.booleans())
def test_an_object_is_taken_up_to_its_end(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    scanner = ObjectScanner()
    assert scanner.read(text + "} more") == (text, len(text))
    assert scanner.closed
    assert not scanner.failed


@settings(max_examples=500, deadline=None)
@given(st.lists(MARKS, max_size=12).map(lambda marks: "{" + "".join(marks) + "}"))
def test_it_closes_exactly_where_json_does(text):
    scanner = ObjectScanner()
    taken, length = scanner.read(text)
    if scanner.closed:
        assert isinstance(strict(taken), dict)
    else:
        with pytest.raises(ValueError, match=r".*"):
            strict(text)
    assert scanner.failed == (not scanner.closed and length < len(text))


@pytest.mark.parametrize(
    "text", ['{"a" 1', '{"a": NaN}', '{"a": 01,', "{,", '{"a": "\\x', '{"a": "\\u00g', '{"a": ]', "{'"]
)
def test_what_cannot_be_an_object_is_noticed_at_once(text):
    scanner = ObjectScanner()
    assert scanner.read(text) == (text[:-1], len(text) - 1)
    assert scanner.failed


@pytest.mark.parametrize(("depth", "deep"), [(DEEPEST, False), (DEEPEST + 1, True), (5000, True)])
def test_a_value_that_is_nested_too_deeply_is_told(depth, deep):
    value = 1
    for number in range(depth):
        value = [0, value] if number % 2 else {"a": value, "b": 0}
    assert too_deep(value) is deep


def test_depth_is_bounded():
    scanner = ObjectScanner()
    scanner.read('{"a":' + "[" * (DEEPEST - 1))
    assert not scanner.failed
    scanner.read("[")
    assert scanner.failed
