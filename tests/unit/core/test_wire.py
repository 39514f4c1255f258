"""What crosses from one process to another arrives as it was."""

import socket
import threading

import msgspec
import numpy as np
import pytest

from mmserve.core.errors import EngineDead, MediaError, MMServeError, Overloaded
from mmserve.core.wire import Fault, decoded, encoded, prefixed, receive, receive_exactly


class Odd(MMServeError):
    """One that stands in no module that both sides know."""

    status = 418
    type = "odd"
    code = "odd"


@pytest.mark.parametrize("error", [MediaError("m", param="p", code="c"), Overloaded("full"), EngineDead("x")])
def test_an_error_is_raised_again_as_what_it_was(error):
    again = Fault.of(error).error()
    assert (type(again), again.body(), again.status) == (type(error), error.body(), error.status)


def test_an_error_of_another_module_is_told_alike():
    again = Fault.of(Odd("m", param="p")).error()
    assert type(again) is MMServeError
    assert (again.body(), again.status) == (Odd("m", param="p").body(), 418)


@pytest.mark.parametrize("kind", ["SystemExit", "Any", "__name__", "nothing"])
def test_an_error_of_no_kind_of_ours_is_a_plain_one(kind):
    assert type(Fault(kind, "m", None, "c").error()) is MMServeError


@pytest.mark.parametrize(
    "array",
    [np.arange(5, dtype=np.int32), np.ones((3, 2), np.int64)[:, ::2], np.empty((3, 0), np.float32)],
    ids=["plain", "strided", "empty"],
)
def test_an_array_arrives_as_it_was_and_read_only(array):
    data = msgspec.msgpack.encode(array, enc_hook=encoded)
    again = msgspec.msgpack.decode(data, type=np.ndarray, dec_hook=decoded)
    assert (again.dtype, again.shape, again.tolist()) == (array.dtype, array.shape, array.tolist())
    assert not again.flags.writeable


# ---------------------------------------------------------------- a socket


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        yield ours, theirs


def test_messages_come_one_by_one_however_they_are_cut(ends):
    ours, theirs = ends
    sent = [b"one", b"", bytes(100_000)]

    def send():
        data = b"".join(map(prefixed, sent))
        for i in range(0, len(data), 999):
            ours.sendall(data[i : i + 999])

    threading.Thread(target=send, daemon=True).start()
    assert [receive(theirs) for _ in sent] == sent


@pytest.mark.parametrize("cut", [b"", b"\x05", b"\x05\0\0\0", b"\x05\0\0\0four"])
def test_an_end_is_told_wherever_it_comes(ends, cut):
    ours, theirs = ends
    ours.sendall(cut)
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)


def test_who_ends_without_having_read_everything_has_ended_too(ends):
    ours, theirs = ends
    theirs.sendall(b"unread")
    ours.close()
    with pytest.raises(EOFError):
        receive_exactly(theirs, 1)
