"""What goes between FFmpeg and a camera: one connection, and no redirects."""

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.errors import MediaError
from mmserve.live.sources.relay import MOST_HEAD, Answers, Relay, connected

OK = b"RTSP/1.0 200 OK\r\nCSeq: 1\r\nContent-Length: 5\r\n\r\n12345"
MOVED = b"RTSP/1.0 302 Found\r\nLocation: rtsp://169.254.169.254/\r\n\r\n"


def packet(data):
    return struct.pack(">cBH", b"$", 0, len(data)) + data


def refused(data, cuts=()):
    answers, start = Answers(), 0
    for cut in [*sorted(cuts), len(data)]:
        if answers.refused_by(data[start:cut]):
            return True
        start = cut
    return False


@given(st.lists(st.integers(0, 200), max_size=20))
def test_packets_and_answers_are_told_apart_wherever_they_are_cut(cuts):
    plain = OK + packet(MOVED) + OK + packet(b"")
    assert not refused(plain, [cut for cut in cuts if cut < len(plain)])
    moved = plain + MOVED
    assert refused(moved, [cut for cut in cuts if cut < len(moved)])


def test_a_redirect_in_a_body_or_a_packet_is_none():
    assert not refused(b"RTSP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(MOVED) + MOVED)


def test_what_is_no_rtsp_is_refused_before_it_is_held():
    assert refused(b"x" * (MOST_HEAD + 1))
    assert refused(b"HTTP/1.1 200 OK\r\n\r\n")
    assert refused(b"REDIRECT rtsp://x/ RTSP/1.0\r\nCSeq: 1\r\n\r\n")


@pytest.fixture
def line():
    """(what FFmpeg holds, the relay, what the camera holds)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        upstream = connected(("127.0.0.1",), listener.getsockname()[1], 5.0, None)
        camera, _ = listener.accept()
    relay = Relay(upstream, idle_s=1.0)
    client = socket.create_connection(("127.0.0.1", relay.port), timeout=5)
    camera.settimeout(5)
    yield client, relay, camera
    relay.close()
    client.close()
    camera.close()


def test_both_sides_hear_each_other(line):
    client, _, camera = line
    client.sendall(b"OPTIONS rtsp://x RTSP/1.0\r\n\r\n")
    assert camera.recv(100).startswith(b"OPTIONS")
    camera.sendall(OK + packet(b"x" * 1000))
    assert client.recv(10_000).startswith(b"RTSP/1.0 200")


def test_a_redirect_never_arrives_and_ends_it(line):
    client, relay, camera = line
    camera.sendall(MOVED)
    assert client.recv(100) == b""
    assert relay.refused
    assert camera.recv(100) == b""


def test_silence_ends_it_however_much_the_other_side_says(line):
    client, relay, _ = line
    stop = threading.Event()

    def keep_asking():
        while not stop.wait(0.1):
            try:
                client.sendall(b"GET_PARAMETER rtsp://x RTSP/1.0\r\n\r\n")
            except OSError:
                return

    threading.Thread(target=keep_asking, daemon=True).start()
    assert client.recv(100) == b""
    stop.set()
    assert not relay.refused


def test_the_relay_takes_one_connection(line):
    _, relay, _ = line
    with pytest.raises(OSError, match=r"refused|reset"):
        socket.create_connection(("127.0.0.1", relay.port), timeout=5).recv(1)


def test_a_host_that_is_not_there_or_proves_no_name_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(MediaError, match="TLS"):
            connected(("127.0.0.1",), port, 5.0, "camera.example")
    with pytest.raises(MediaError, match="refuses"):
        connected(("127.0.0.1",), port, 5.0, None)
