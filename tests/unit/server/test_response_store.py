import tracemalloc

import msgspec

from mmserve.server.response_store import ResponseStore, StoredResponse


def response(size=10):
    return StoredResponse({"text": "x" * size}, "", ())


def test_what_was_used_last_is_kept_longest():
    store = ResponseStore(most=2, most_bytes=1 << 20)
    store.put("me", "a", response())
    store.put("me", "b", response())
    store.get("me", "a")
    store.put("me", "c", response())
    assert [store.get("me", name) is None for name in "abc"] == [False, True, False]


def test_bytes_are_bounded_and_given_back():
    store = ResponseStore(most_bytes=3000)
    for number in range(50):
        store.put("me", str(number), response(700))
        assert store.used_bytes <= 3000
    store.put("me", "monster", response(4000))
    assert store.get("me", "monster") is None
    for number in range(50):
        store.delete("me", str(number))
    assert (store.used_bytes, len(store)) == (0, 0)


def test_the_bound_is_of_the_memory_that_responses_take():
    store = ResponseStore(most_bytes=1 << 20)
    tracemalloc.start()
    try:
        for number in range(8):
            given = msgspec.json.decode(b"[%b]" % b",".join([b"[]"] * 20_000))
            store.put("me", str(number), StoredResponse({"text": "x"}, given, ()))
        del given
        assert tracemalloc.get_traced_memory()[0] < 2 * store.used_bytes
    finally:
        tracemalloc.stop()


def test_a_response_comes_back_as_it_was_put():
    store, kept = (
        ResponseStore(most_bytes=1 << 20),
        ({"role": "user", "content": [{"type": "text", "text": "Grüße"}]},),
    )
    store.put("me", "a", StoredResponse({"text": None, "top_p": 0.5}, [{"n": 1 << 70}], kept))
    found = store.get("me", "a")
    assert (found.body, found.input) == ({"text": None, "top_p": 0.5}, [{"n": 1 << 70}])
    assert tuple(found.messages) == kept


def test_responses_belong_to_their_owner():
    store = ResponseStore(most_bytes=1 << 20)
    store.put("me", "a", response())
    assert store.get("you", "a") is None
    assert not store.delete("you", "a")
    assert store.delete("me", "a")
    assert not store.delete("me", "a")
