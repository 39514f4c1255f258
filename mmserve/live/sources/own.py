"""What every camera's process does first."""

import logging
import signal
import socket
import time
from collections.abc import Callable

from mmserve.core.wire import die_with
from mmserve.live.sources.messages import CameraHello, to_hello
from mmserve.live.sources.post import Post
from mmserve.logs import set_up_logging, tell_stacks_on_signal
from mmserve.preprocess.pool.worker import limit_memory
from mmserve.processes.messages import Ready
from mmserve.processes.parent import Parent

# What they log is for who develops them, and may hold addresses of clients.
CHATTY = ("aioice", "aiortc", "libav")


def begin(
    socket_fd: int, line_fd: int, parent_pid: int, busy_since: Callable[[], float | None]
) -> tuple[CameraHello, Post]:
    """Read the hello, bound this process's memory, and give signs of life from now on.

    ctrl-C and a SIGTERM to the whole group are for the api, whose end is this process's end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with(parent_pid)
    set_up_logging()
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    tell_stacks_on_signal()
    parent = Parent(socket_fd, parent_pid, "")
    hello = to_hello(parent.first())
    limit_memory(hello.cameras.camera_memory_mib << 20)
    post = Post(socket.socket(fileno=line_fd))
    parent.ready(Ready(), busy_since)
    return hello, post


class Busy:
    """Since when this process has been at one thing that may hang, for its signs of life."""

    def __init__(self) -> None:
        self.since: float | None = None

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.since = None
