"""What the engine and the detokenizer share: their parent as they see it, and the end that comes with it."""

import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from mmserve.core.wire import die_with, prefixed, receive, receive_exactly
from mmserve.processes.messages import Hello, Ready, to_bytes, to_hello
from mmserve.processes.pulse import Pulse


class Parent:
    """The child's end of the socket to the process that started it.

    The socket's end is the parent's end, however that came: a thread waits for it, removes the folder of the
    sockets and ends this process. The kernel could kill this process at once when its parent dies (``bind``),
    also when it hangs; but then the folder would stay, so that is asked for when the folder is gone.
    """

    def __init__(self, fd: int, pid: int, folder: str) -> None:
        self._socket = socket.socket(fileno=fd)
        self._pid = pid
        self._folder = folder

    def hello(self) -> Hello:
        """What the parent says first; from now on its end is this process's end."""
        return to_hello(self.first())

    def first(self) -> bytes:
        """The same, for whoever reads a hello of another kind."""
        try:
            hello = receive(self._socket)
        except EOFError:
            self._leave()
        threading.Thread(target=self._watch, name="parent", daemon=True).start()
        return hello

    def say(self, message: Any) -> None:
        self._socket.sendall(prefixed(to_bytes(message)))

    def ready(self, words: Ready, busy_since: Callable[[], float | None]) -> None:
        """Say so, and give signs of life from now on; see ``Pulse``, whose thread alone speaks then."""
        self.say(words)
        Pulse(self.say, busy_since).start()

    def bind(self) -> None:
        """Have the kernel kill this process when its parent dies. There must be nothing left to tidy up."""
        die_with(self._pid)

    def _watch(self) -> None:
        with suppress(EOFError):
            receive_exactly(self._socket, 1)  # which never comes: nothing more is said
        self._leave()

    def _leave(self) -> NoReturn:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)
