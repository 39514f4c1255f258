"""The items of a realtime conversation: their order, their bounds, and what the model is told of them."""

import pytest
from msgspec import structs

from mmserve.core.errors import InvalidRequest, NotFound
from mmserve.server.realtime_items import MOST_ITEMS, Conversation, Item, folded, oldest, said


def user(name, text="hi", tokens=10, nbytes=100):
    item = said(
        {"id": name, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    )
    return structs.replace(item, tokens=tokens, nbytes=nbytes)


def answer(name, text="yes", tokens=10):
    content = [{"type": "output_text", "text": text}]
    item = said({"id": name, "type": "message", "role": "assistant", "content": content})
    return structs.replace(item, tokens=tokens)


def call(name, tool, status="completed"):
    fields = {"call_id": f"c_{name}", "name": tool, "arguments": '{"a": 1}', "status": status}
    return said({"id": name, "type": "function_call", **fields})


def names(items):
    return [item.id for item in items]


def filled(*items, most_bytes=1 << 20):
    conversation = Conversation(most_bytes)
    for item in items:
        conversation.put(item)
    return conversation


def test_items_stand_where_they_are_put():
    conversation = filled(user("b"), user("d"))
    assert conversation.put(user("c"), "b") == "b"
    assert conversation.put(user("a"), "root") is None
    assert conversation.put(user("e"), "d") == "d"
    assert conversation.put(user("f")) == "e"
    assert names(conversation) == ["a", "b", "c", "d", "e", "f"]


def test_an_item_is_unique_and_stands_behind_one_that_is_there():
    conversation = filled(user("a"))
    with pytest.raises(InvalidRequest, match="already"):
        conversation.check(user("a"), None, may_drop=True)
    with pytest.raises(NotFound) as caught:
        conversation.check(user("b"), "z", may_drop=True)
    assert caught.value.param == "previous_item_id"


def test_an_item_that_was_deleted_while_it_was_said_stays_deleted():
    conversation = filled(answer("a", ""))
    assert conversation.remove("a")
    conversation.replace(answer("a", "whole"))
    assert not conversation.remove("a")


def test_the_oldest_go_where_there_is_too_much():
    conversation = filled(*(user(str(n), nbytes=100) for n in range(5)), most_bytes=250)
    assert names(conversation.too_much()) == ["0", "1", "2"]
    many = filled(*(user(str(n), nbytes=1) for n in range(MOST_ITEMS + 2)))
    assert names(many.too_much()) == ["0", "1"]


def test_full_is_full_where_nothing_may_go():
    conversation = filled(user("a", nbytes=200), most_bytes=250)
    conversation.check(user("b", nbytes=200), None, may_drop=True)
    with pytest.raises(InvalidRequest) as caught:
        conversation.check(user("b", nbytes=200), None, may_drop=False)
    assert caught.value.code == "conversation_full"


def test_truncation_goes_in_bulk_and_spares_the_last_question():
    items = [user("q1"), answer("a1"), user("q2"), answer("a2"), user("q3")]
    assert names(oldest(items, 50)) == ["q1"]  # something must go
    assert names(oldest(items, 25)) == ["q1", "a1", "q2"]
    assert names(oldest(items, 0)) == ["q1", "a1", "q2", "a2"]
    assert oldest([user("q1")], 0) == []


def test_words_and_calls_that_the_model_said_in_a_row_are_one_turn():
    items = [user("q"), answer("a", "Wait."), call("x", "look"), call("y", "hear"), user("z")]
    first, turn, last = folded(items)
    assert [m.role for m in (first, turn, last)] == ["user", "assistant", "user"]
    assert turn.content[0].text == "Wait."
    assert [c["function"]["name"] for c in turn.extra["tool_calls"]] == ["look", "hear"]
    assert [c["function"]["name"] for c in items[2].messages[0].extra["tool_calls"]] == ["look"]  # untouched


def test_a_call_that_broke_says_nothing_to_the_model():
    item = call("x", "look", status="incomplete")
    assert isinstance(item, Item)
    assert item.messages == ()
