"""Stored media: one id for one content, a bound in bytes and age, and nobody sees another's."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.errors import PayloadTooLarge
from mmserve.preprocess.library import MediaLibrary


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def library(clock):
    return MediaLibrary(100, 60.0, clock=clock)


def test_storing_the_same_twice_gives_one_id_and_keeps_one_copy(library, clock):
    first = library.put("ann", b"x" * 10, {"max_pixels": 5}, kind="image")
    clock.now += 10
    again = library.put("ann", b"x" * 10, {"max_pixels": 5}, kind="image")
    assert again.id == first.id
    assert (again.created, again.expires) == (1000.0, 1070.0)
    assert library.stats()["media_store_bytes"] == 10
    assert library.get("ann", first.id).data == b"x" * 10


def test_other_bytes_options_kind_or_owner_are_another_id(library):
    ids = {
        library.put("ann", b"x", kind="image").id,
        library.put("ann", b"y", kind="image").id,
        library.put("ann", b"x", {"fps": 1}, kind="image").id,
        library.put("ann", b"x", kind="video").id,
        library.put("bea", b"x", kind="image").id,
        library.put("ann", (b"x",), kind="video").id,
        library.put("ann", (b"xy", b"z"), kind="video").id,
        library.put("ann", (b"x", b"yz"), kind="video").id,
    }
    assert len(ids) == 8
    assert {len(name) for name in ids} == {len("media-") + 64}


def test_options_in_another_order_are_the_same(library):
    one = library.put("ann", b"x", {"fps": 2.0, "num_frames": 4}, kind="video")
    assert one.id == library.put("ann", b"x", {"num_frames": 4, "fps": 2.0}, kind="video").id


def test_owners_never_see_each_other_s(library):
    stored = library.put("ann", b"x", kind="image")
    library.bind("ann", "cat", "image", b"cat of ann")
    assert library.get("bea", stored.id) is None
    assert library.bound("bea", "cat") is None
    assert not library.delete("bea", stored.id)
    assert library.list("bea") == ()
    library.bind("bea", "cat", "image", b"cat of bea")
    assert library.bound("ann", "cat").data == b"cat of ann"


def test_an_id_is_not_a_uuid_nor_the_other_way_round(library):
    stored = library.put("ann", b"x", kind="image")
    library.bind("ann", "cat", "image", b"y")
    assert library.bound("ann", stored.id) is None
    assert library.get("ann", "cat") is None
    assert [m.id for m in library.list("ann")] == [stored.id]


def test_a_uuid_means_what_was_sent_with_it_last(library):
    library.bind("ann", "cat", "image", b"old")
    library.bind("ann", "cat", "video", b"new")
    found = library.bound("ann", "cat")
    assert (found.kind, found.data) == ("video", b"new")
    library.bind("ann", "cat", "image", b"x" * 101)
    assert library.bound("ann", "cat") is None, "never what it meant before"


def test_the_least_recently_used_goes_when_bytes_run_out(library):
    a, b = (library.put("ann", name * 40, kind="image") for name in (b"a", b"b"))
    library.get("ann", a.id)
    library.bind("ann", "cat", "image", b"c" * 40)
    assert library.get("ann", b.id) is None
    assert library.get("ann", a.id) is not None
    assert library.bound("ann", "cat") is not None
    assert library.stats()["media_store_evicted"] == 1


def test_what_nobody_used_for_its_time_is_gone(library, clock):
    used = library.put("ann", b"a", kind="image")
    left = library.put("ann", b"b", kind="image")
    library.bind("ann", "cat", "image", b"c")
    clock.now += 59
    assert library.get("ann", used.id).expires == 1119.0
    clock.now += 1
    assert library.get("ann", left.id) is None
    assert library.bound("ann", "cat") is None
    assert [m.id for m in library.list("ann")] == [used.id]
    assert library.stats()["media_store_expired"] == 2


def test_media_beyond_the_whole_store_is_refused_with_the_bound(library):
    with pytest.raises(PayloadTooLarge, match=r"101 bytes.*at most 100 \(media_store_mib\)"):
        library.put("ann", b"x" * 101, kind="image")
    assert library.stats()["media_store_items"] == 0


def test_delete_forgets_at_once(library):
    stored = library.put("ann", b"x", kind="image")
    assert library.delete("ann", stored.id)
    assert not library.delete("ann", stored.id)
    assert library.get("ann", stored.id) is None
    assert library.stats()["media_store_bytes"] == 0


def test_many_threads_leave_the_accounts_right():
    library = MediaLibrary(400, 60.0)

    def work(owner):
        for i in range(300):
            stored = library.put(owner, bytes([i % 7]) * (i % 50 + 1), kind="image")
            library.bind(owner, str(i % 5), "image", b"x" * (i % 30))
            library.get(owner, stored.id)
            if i % 3 == 0:
                library.delete(owner, stored.id)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.check_integrity()


owners, names = st.sampled_from(["ann", "bea"]), st.sampled_from(["u", "v", "w"])
actions = st.one_of(
    st.tuples(st.just("put"), owners, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("bind"), owners, names, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("bound"), owners, names),
    st.tuples(st.just("delete"), owners),
    st.tuples(st.just("wait"), st.floats(0, 50)),
)


@given(st.lists(actions, max_size=60))
def test_whatever_is_found_is_what_its_owner_sent_last_and_in_time(steps):
    """Against a plain dictionary that forgets nothing: the library may lack, never mislead."""
    clock = Clock()
    library = MediaLibrary(64, 60.0, clock=clock)
    sent, used = {}, {}
    for action, *args in steps:
        if action == "put":
            owner, data = args
            stored = library.put(owner, data, kind="image")
            assert library.get(owner, stored.id).data == data
        elif action == "bind":
            owner, name, data = args
            library.bind(owner, name, "image", data)
            sent[owner, name], used[owner, name] = data, clock.now
        elif action == "bound":
            found = library.bound(*args)
            if found is not None:
                assert found.data == sent[tuple(args)]
                assert clock.now < used[tuple(args)] + 60
                used[tuple(args)] = clock.now
        elif action == "delete" and library.list(args[0]):
            assert library.delete(args[0], library.list(args[0])[0].id)
        elif action == "wait":
            clock.now += args[0]
        library.check_integrity()
