"""Thoughts told from answers, wherever the text is cut."""

import pytest
from helpers.cut_text import cuts, parsed, told
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.thinking import Start
from mmserve.parsing.events import Content, Reasoning
from mmserve.parsing.reasoning import ReasoningParser

PIECES = st.sampled_from(
    ["<think>", "</think>", "<think", "</", "think>", "\n", " ", "a", "Käse 🧀", "<", "`"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)

CASES = [
    # start, text, thoughts, content
    (Start.UNDECIDED, "<think>\nwhy\n</think>\n\nbecause", "why", "because"),
    (Start.UNDECIDED, "\n<think>why</think>because", "why", "because"),
    (Start.UNDECIDED, "no thoughts\nat all", "", "no thoughts\nat all"),
    (Start.UNDECIDED, "\n\n  no thoughts", "", "\n\n  no thoughts"),
    (Start.UNDECIDED, "", "", ""),
    (Start.UNDECIDED, " \n", "", " \n"),
    (Start.UNDECIDED, "<thin", "", "<thin"),
    (Start.UNDECIDED, "<think>\n\n</think>\n\nat once", "", "at once"),
    (Start.UNDECIDED, "<think>\nnever closed\n", "never closed\n", ""),
    (Start.UNDECIDED, "<think>cut off </thi", "cut off </thi", ""),
    (Start.UNDECIDED, "Well.\n<think>\nwhy\n</think>\n\nbecause", "why", "Well.\nbecause"),
    (Start.UNDECIDED, "the tag `<think>` opens it", "", "the tag `<think>` opens it"),
    (Start.UNDECIDED, "<think>a</think>b\n<think>c</think>", "a", "b\n<think>c</think>"),
    (Start.UNDECIDED, "<think>a\n\nb <think> c</think>d", "a\n\nb <think> c", "d"),
    (Start.UNDECIDED, "a</think>b", "", "a</think>b"),
    (Start.INSIDE, "why\n</think>\n\nbecause", "why", "because"),
    (Start.INSIDE, "\n\nwhy</think>because\n", "why", "because\n"),
    (Start.INSIDE, "<think>\nwhy</think>because", "why", "because"),
    (Start.INSIDE, "never closed", "never closed", ""),
    (Start.INSIDE, "</think>\n\nat once", "", "at once"),
    (Start.OUTSIDE, "<think>a</think>\n", "", "<think>a</think>\n"),
]


@pytest.mark.parametrize(("start", "text", "thoughts", "content"), CASES)
def test_thoughts_and_answer(start, text, thoughts, content):
    assert told(parsed(ReasoningParser(start), [text]))[:2] == (thoughts, content)


@pytest.mark.parametrize(("start", "text", "thoughts", "content"), CASES)
def test_the_same_letter_by_letter(start, text, thoughts, content):
    assert told(parsed(ReasoningParser(start), text))[:2] == (thoughts, content)


@settings(deadline=None)
@given(cuts(TEXTS), st.sampled_from(Start))
def test_where_it_is_cut_changes_nothing(cut, start):
    text, pieces = cut
    assert parsed(ReasoningParser(start), pieces) == parsed(ReasoningParser(start), [text])


def test_what_is_certain_is_told_at_once():
    parser = ReasoningParser()
    assert parser.feed("<think>\nI ") == [Reasoning("I ")]
    assert parser.feed("see\n") == [Reasoning("see")]
    assert parser.feed("it.") == [Reasoning("\nit.")]
    assert parser.feed("</think>") == []
    assert parser.feed("\n\nA ca") == [Content("A ca")]


@pytest.mark.parametrize(
    ("prompt", "thinks", "start"),
    [
        ("<|im_start|>assistant\n", True, Start.UNDECIDED),
        ("<|im_start|>assistant\n", False, Start.OUTSIDE),
        ("<|im_start|>assistant\n<think>\n", True, Start.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True, Start.OUTSIDE),
    ],
)
def test_the_prompt_decides_where_the_answer_begins(prompt, thinks, start):
    assert Start.of(prompt, thinks) is start
