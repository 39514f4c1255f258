"""A camera's process: its end of the socket to the api."""

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from mmserve.core.wire import receive
from mmserve.live.sources.messages import (
    FromCamera,
    Picture,
    ToCamera,
    to_bytes,
    to_camera,
)

MOST_WORDS = 4096  # that wait while the api does not read


class Shown(NamedTuple):
    """A frame that is to be sent, with its thumbnail uint8 [h, w]. ``rgb`` makes its pixels, uint8
    [height, width, 3]; None if it cannot."""

    seq: int
    captured: float
    received: float
    luma: np.ndarray
    rgb: Callable[[], np.ndarray | None]


class Post:
    """Sends on a thread of its own: words in their order, and of pictures the newest alone.

    So the pixels are made of those pictures only that are sent, and never on the thread that decodes.
    ``leave`` ends this process when the api has closed the camera, or takes nothing any more.
    """

    def __init__(self, sock: socket.socket, leave: Callable[[int], object] = os._exit) -> None:
        self._socket, self._leave = sock, leave
        self._words: deque[FromCamera] = deque()
        self._newest: Shown | None = None
        self._news = threading.Condition()
        self._idle = True
        threading.Thread(target=self._work, name="post", daemon=True).start()

    def say(self, message: FromCamera) -> None:
        with self._news:
            if len(self._words) == MOST_WORDS:
                self._leave(1)  # the api takes nothing any more, and would kill this process next
            self._words.append(message)
            self._news.notify()

    def show(self, shown: Shown) -> Shown | None:
        """Send it as soon as the one before has left; returns the one that it has taken the place of."""
        with self._news:
            superseded, self._newest = self._newest, shown
            self._news.notify()
        return superseded

    def flush(self, seconds: float) -> None:
        """Wait until all has left, for so long at most."""
        with self._news:
            self._news.wait_for(lambda: self._idle and not self._words and self._newest is None, seconds)

    def listen(self, hear: Callable[[ToCamera], object]) -> None:
        """Hand what the api says to ``hear``, on a thread of its own."""
        threading.Thread(target=self._hear, args=(hear,), name="ear", daemon=True).start()

    def _work(self) -> None:
        try:
            while True:
                self._send_next()
        except OSError:
            self._leave(0)  # the api has closed this camera

    def _send_next(self) -> None:
        with self._news:
            self._idle = True
            self._news.notify_all()
            self._news.wait_for(lambda: self._words or self._newest)
            self._idle = False
            word = self._words.popleft() if self._words else None
            shown = None
            if word is None:
                shown, self._newest = self._newest, None
        if word is not None:
            self._socket.sendall(to_bytes(word))
        elif shown is not None:
            self._send_picture(shown)

    def _send_picture(self, shown: Shown) -> None:
        pixels = shown.rgb()
        if pixels is None:
            return
        height, width, _ = pixels.shape
        seq, captured, received, luma, _ = shown
        self._socket.sendall(to_bytes(Picture(seq, captured, received, luma, height, width)))
        self._socket.sendall(np.ascontiguousarray(pixels).data)

    def _hear(self, hear: Callable[[ToCamera], object]) -> None:
        with suppress(EOFError):
            while True:
                hear(to_camera(receive(self._socket)))
        self._leave(0)
