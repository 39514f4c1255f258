"""The api's end of the socket to one camera's process."""

import asyncio
import socket
from contextlib import suppress

import numpy as np

from mmserve.core.wire import PREFIX_BYTES, length_of
from mmserve.live.sources.messages import (
    MOST_BYTES,
    FromCamera,
    Picture,
    ToCamera,
    from_camera,
    to_bytes,
)

MOST_WAITING = 256  # messages to a process that does not read


class Line:
    """Used in one event loop; ``close`` it there. ``most_pixels`` is the largest picture that is believed."""

    def __init__(self, sock: socket.socket, most_pixels: int) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._most_pixels = most_pixels
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)
        self._sending = asyncio.create_task(self._send())

    async def receive(self) -> tuple[FromCamera, np.ndarray | None]:
        """The next message, with a picture's uint8 [height, width, 3].

        EOFError when there will be none, ValueError (msgspec's too) for what no camera would say.
        """
        length = length_of(await self._exactly(PREFIX_BYTES))
        if length > MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        message = from_camera(bytes(await self._exactly(length)))
        if not isinstance(message, Picture):
            return message, None
        self._check(message)
        pixels = np.frombuffer(await self._exactly(message.nbytes), np.uint8)
        return message, pixels.reshape(message.height, message.width, 3)

    def _check(self, picture: Picture) -> None:
        height, width, luma = picture.height, picture.width, picture.luma
        if not (height > 0 and width > 0 and height * width <= self._most_pixels):
            raise ValueError(f"a picture of {width}x{height}")
        if luma.dtype != np.uint8 or luma.ndim != 2 or 0 in luma.shape:
            raise ValueError(f"a thumbnail of {luma.dtype} {luma.shape}")

    def say(self, message: ToCamera) -> bool:
        """Send it soon; False if it is dropped, since the process does not read what was sent before."""
        try:
            self._outbox.put_nowait(to_bytes(message))
        except asyncio.QueueFull:
            return False
        return True

    def close(self) -> None:
        self._sending.cancel()
        self._socket.close()

    async def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            got = await self._part(rest)
            if not got:
                raise EOFError
            rest = rest[got:]
        return data

    async def _part(self, rest: memoryview) -> int:
        try:
            return await asyncio.get_running_loop().sock_recv_into(self._socket, rest)
        except OSError:  # so it looks when the process had not read everything
            return 0

    async def _send(self) -> None:
        with suppress(OSError):  # ``receive`` tells of the end
            while True:
                await asyncio.get_running_loop().sock_sendall(self._socket, await self._outbox.get())
