"""What processes say to each other as msgpack: errors, and values that msgspec does not know by itself.

Everything is decoded into fixed types, so nothing that another process says is executed. How messages follow
each other over a socket: each with its length in front. And how a child process ends with its parent.
"""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct

from mmserve.core import errors
from mmserve.core.errors import MMServeError

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
PREFIX_BYTES = 4  # of the length in front of a message


class Fault(Struct, frozen=True):
    """An error, to be raised again on the other side. ``status`` and ``type`` None are those of its class."""

    kind: str
    message: str
    param: str | None
    code: str
    status: int | None = None
    type: str | None = None

    @classmethod
    def of(cls, error: MMServeError) -> "Fault":
        return cls(type(error).__name__, error.message, error.param, error.code, error.status, error.type)

    def error(self) -> MMServeError:
        """Of the same class if it is one of ``mmserve.core.errors``, and told alike in any case."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, MMServeError)):
            kind = MMServeError
        error = kind(self.message, param=self.param, code=self.code)
        error.status = self.status or error.status
        error.type = self.type or error.type
        return error


def encoded(value: Any) -> Any:
    """``enc_hook`` of msgspec: an array as its dtype, shape and bytes, a number of numpy as a plain one."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    raise NotImplementedError(f"{type(value).__name__} is not part of any message")


def decoded(kind: type, value: Any) -> Any:
    """``dec_hook`` of msgspec; arrays are read-only."""
    if kind is Path:
        return Path(value)
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    raise NotImplementedError(f"{kind.__name__} is not part of any message")


def prefixed(body: bytes) -> bytes:
    """``body`` with its length in front."""
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def length_of(prefix: bytes | bytearray) -> int:
    """Of the message behind this prefix."""
    return int.from_bytes(prefix, "little")


def receive(sock: socket.socket) -> bytes:
    """Wait for the next message; EOFError when the other side says no more."""
    return receive_exactly(sock, length_of(receive_exactly(sock, PREFIX_BYTES)))


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Wait for so many bytes; EOFError when the other side has ended before."""
    data = bytearray()
    while len(data) < count:
        try:
            part = sock.recv(count - len(data))
        except OSError:  # so it looks when the other side had not read everything
            part = b""
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def die_with(parent: int) -> None:
    """End when the process that started this one does, even if this one is busy at that moment.

    Beside the end of the socket, which a busy process does not see. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before it could be watched
