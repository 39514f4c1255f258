"""Requests take turns, however many items each has."""

from hypothesis import given
from hypothesis import strategies as st

from mmserve.preprocess.pool.fair import FairQueue


def filled(*items):
    queue = FairQueue()
    for item in items:
        queue.put(item[0], item)
    return queue


def drained(queue):
    found = []
    while (item := queue.take()) is not None:
        found.append(item)
    return found


def test_requests_take_turns_and_keep_their_own_order():
    assert drained(filled("a1", "a2", "a3", "b1", "c1", "c2")) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_one_that_comes_later_waits_for_one_item_of_each():
    queue = filled("a1", "a2", "a3", "a4")
    assert queue.take() == "a1"
    queue.put("b", "b1")
    assert drained(queue) == ["a2", "b1", "a3", "a4"]


def test_what_may_not_begin_holds_up_its_own_request_only():
    queue = filled("a1", "a2", "b1")
    assert queue.take(lambda item: item != "a1") == "b1"
    assert queue.take(lambda item: item != "a1") is None
    assert drained(queue) == ["a1", "a2"]


def test_an_item_put_back_is_its_request_s_first():
    queue = filled("a1", "a2", "b1")
    queue.put_back("a", queue.take())
    assert drained(queue) == ["b1", "a1", "a2"]


def test_dropped_items_are_gone():
    queue = filled("a1", "a2", "b1")
    assert queue.drop("a", "a1")
    assert queue.drop("b", "b1")
    assert not queue.drop("b", "b1")
    assert not queue.drop("z", "z1")
    assert (len(queue), list(queue)) == (1, ["a2"])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99))))
def test_everything_comes_out_once_and_in_its_request_s_order(items):
    queue = FairQueue()
    for request, item in items:
        queue.put(request, (request, item))
    assert len(queue) == len(items)
    found = drained(queue)
    for request in range(5):
        assert [i for i in found if i[0] == request] == [i for i in items if i[0] == request]
    waiting = {request: sum(i[0] == request for i in items) for request, _ in items}
    for n, (request, _) in enumerate(found):
        # Nobody is served a second time before everybody who waits was served once.
        round_ = sum(i[0] == request for i in found[:n])
        assert all(sum(i[0] == r for i in found[:n]) >= min(round_, waiting[r]) for r in waiting)
