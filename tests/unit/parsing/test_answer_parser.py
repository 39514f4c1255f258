"""Thoughts, calls and words of one answer."""

from helpers.cut_text import cuts, parsed, told
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.thinking import Start
from mmserve.parsing.combined import AnswerParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_an_answer_may_have_all_three():
    parser = AnswerParser(Start.UNDECIDED, {"f": {}})
    events = parsed(parser, f"<think>\nI must look.\n</think>\n\nLet me look.\n{CALL}\n{CALL}")
    assert told(events) == ("I must look.", "Let me look.", [("f", '{"x": 1}')] * 2)
    assert parser.calls == 2


def test_a_call_that_is_only_thought_of_is_none():
    events = parsed(AnswerParser(Start.INSIDE, {"f": {}}), f"perhaps {CALL}\n</think>\n\nNo.")
    assert told(events) == (f"perhaps {CALL}", "No.", [])


def test_without_tools_a_call_is_text():
    assert told(parsed(AnswerParser(Start.OUTSIDE), [CALL])) == ("", CALL, [])


def test_the_order_of_calls_and_words_is_kept():
    kinds = [type(e).__name__ for e in parsed(AnswerParser(Start.OUTSIDE, {}), [f"A\n{CALL}\nB"])]
    assert kinds == ["Content", "CallBegin", "CallArguments", "CallEnd", "Content"]


SCRAPS = st.sampled_from(["<think>", "</think>", "\n", "word", CALL, "<tool_call>", "</tool", '{"name', "<"])


@settings(deadline=None)
@given(cuts(st.lists(SCRAPS, max_size=8).map("".join)), st.sampled_from(Start))
def test_where_it_is_cut_changes_nothing(cut, start):
    text, pieces = cut
    assert parsed(AnswerParser(start, {}), pieces) == parsed(AnswerParser(start, {}), [text])
