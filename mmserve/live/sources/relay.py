"""Between FFmpeg's RTSP client and a camera: the address that was checked, TLS that is proved, no redirects.

FFmpeg looks names up itself, follows a server wherever it sends it to, and does not check certificates. So it
is given an address on this machine, and what it says goes over the one connection that we have made:

    FFmpeg ── rtsp://127.0.0.1 ──▶ Relay ── the checked number, in TLS for rtsps ──▶ camera

Video comes interleaved over that same connection (RFC 2326, 10.12), so there is no other.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mmserve.core.errors import MediaError
from mmserve.preprocess.address import UNREACHABLE

PART = 1 << 16
MOST_HEAD = 1 << 16  # bytes of one answer's head


class Relay:
    """Takes one connection at ``port`` of 127.0.0.1, and relays it to ``upstream`` until either ends.

    It ends, ``refused``, when the camera redirects or speaks no RTSP, and ``silent`` when that says nothing
    for ``idle_s``. One thread does both ways: a TLS connection must not be read and written at the same time.
    """

    def __init__(self, upstream: socket.socket, idle_s: float) -> None:
        self.refused = self.silent = False
        self._upstream = upstream
        self._idle_s = idle_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self._listener.settimeout(idle_s)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, self._upstream):
            _shut(one)

    def _run(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it was closed, or nobody came
            return
        finally:
            self._listener.close()
        self._upstream.settimeout(self._idle_s)
        try:
            self._relay(client)
        except (OSError, ValueError):  # ValueError: of a socket that was closed meanwhile
            pass
        finally:
            _shut(client)
            _shut(self._upstream)

    def _relay(self, client: socket.socket) -> None:
        answers = Answers()
        heard = time.monotonic()
        while (left := heard + self._idle_s - time.monotonic()) > 0:
            ready, _, _ = select.select((client, self._upstream), (), (), left)
            if client in ready:
                if not (part := client.recv(PART)):
                    return
                self._upstream.sendall(part)
            if self._upstream in ready:
                heard = time.monotonic()
                for part in self._heard():
                    if not part or answers.refused_by(part):
                        self.refused = bool(part)
                        return
                    client.sendall(part)
        self.silent = True

    def _heard(self) -> Iterator[bytes]:
        """What can be read without waiting; TLS may hold more than the socket says."""
        yield self._upstream.recv(PART)
        while isinstance(self._upstream, ssl.SSLSocket) and self._upstream.pending():
            yield self._upstream.recv(PART)


class Answers:
    """Reads along what an RTSP server says, wherever it is cut: answers and interleaved packets in turn."""

    def __init__(self) -> None:
        self._held = bytearray()  # of a head that is not whole
        self._skip = 0  # bytes of a body or packet still to come

    def refused_by(self, part: bytes) -> bool:
        """Whether a redirect, or what is no RTSP, has begun by the end of ``part``."""
        self._held += part
        while self._held:
            if self._skip:
                gone = min(self._skip, len(self._held))
                del self._held[:gone]
                self._skip -= gone
            elif self._held[0] == ord("$"):
                if len(self._held) < 4:
                    return False
                self._skip = 4 + int.from_bytes(self._held[2:4], "big")
            else:
                head = self._head()
                if head is None:
                    return len(self._held) > MOST_HEAD
                if _sends_away(head):
                    return True
                self._skip = _length(head)
        return False

    def _head(self) -> bytes | None:
        """Take a whole head off what is held."""
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._held[:end])
        del self._held[: end + 4]
        return head


def connected(numbers: Sequence[str], port: int, seconds: float, tls_name: str | None) -> socket.socket:
    """A connection to the first of ``numbers`` that answers; in TLS, proved for ``tls_name``, if given.

    MediaError if there is none.
    """
    why = "refuses the connection"
    for number in numbers:
        try:
            plain = socket.create_connection((number, port), timeout=seconds)
        except OSError as error:
            why = "does not answer" if isinstance(error, TimeoutError) else "refuses the connection"
            continue
        if tls_name is None:
            return plain
        try:
            return ssl.create_default_context().wrap_socket(plain, server_hostname=tls_name)
        except (OSError, ValueError):  # ssl.SSLError is an OSError
            plain.close()
            why = "has no valid TLS certificate, or does not speak TLS"
    raise MediaError(f"the camera's host {why}", code=UNREACHABLE)


def _sends_away(head: bytes) -> bool:
    """Whether it is a redirect, or what no camera would say."""
    if not head.strip():
        return False
    first = head.lstrip(b"\r\n").split(b"\r\n", 1)[0].split(b" ")
    if first[0].startswith(b"RTSP/"):
        return len(first) < 2 or first[1].startswith(b"3")
    return first[0] == b"REDIRECT" or not first[-1].startswith(b"RTSP/")


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value.strip()[:9])
    return 0


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
