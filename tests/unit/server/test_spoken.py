"""Events of an answer as chunks and messages of the chat endpoint."""

import json

from openai.types.chat import ChatCompletionMessage

from mmserve.core.thinking import Start
from mmserve.parsing.combined import AnswerParser
from mmserve.server.spoken import Spoken

CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"x" 1}}\n</tool_call>'


def spoken(text, tools=None):
    """The choice of ``text``, and its deltas letter by letter."""
    choice, parser = Spoken(), AnswerParser(Start.UNDECIDED, tools)
    deltas = [delta for letter in text for delta in choice.take(parser.feed(letter))]
    return choice, deltas + choice.take(parser.finish())


def test_thoughts_words_and_calls_have_their_own_fields():
    choice, deltas = spoken(f"<think>\nhm\n</think>\n\nI look.\n{CALL}", {"look": {}})
    message = choice.message()
    assert (message["reasoning_content"], message["content"]) == ("hm", "I look.")
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "look", "arguments": '{"x": 1}'})
    ChatCompletionMessage.model_validate(message)
    assert choice.finish_reason("stop") == "tool_calls"
    assert choice.finish_reason("length") == "length"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas) == "I look."


def test_a_streamed_call_adds_up_to_the_whole_one():
    choice, deltas = spoken(CALL + CALL, {"look": {}})
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    for index, call in enumerate(choice.message()["tool_calls"]):
        own = [part for part in parts if part["index"] == index]
        assert (own[0]["id"], own[0]["function"]) == (call["id"], {"name": "look", "arguments": ""})
        assert all(set(part) == {"index", "function"} for part in own[1:])
        assert "".join(p["function"]["arguments"] for p in own) == call["function"]["arguments"]
    assert choice.message()["content"] is None


def test_a_call_that_broke_is_content():
    choice, deltas = spoken(BROKEN, {"look": {}})
    assert choice.message() == {"role": "assistant", "content": BROKEN, "refusal": None}
    assert choice.finish_reason("stop") == "stop"
    assert "".join(d.get("content", "") for d in deltas) == BROKEN


def test_plain_words_are_as_ever():
    choice, deltas = spoken("hello")
    assert choice.message() == {"role": "assistant", "content": "hello", "refusal": None}
    assert json.dumps(deltas) == json.dumps([{"content": letter} for letter in "hello"])
