"""uvicorn's websocket, with ends that do not depend on the client: who does not read or answer is let go."""

from contextlib import suppress
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from mmserve.server.socket_door import GOING_AWAY

LINGER_S = 2.0  # for a client to see why it was closed; then the connection is cut


class SocketWire(WebSocketsSansIOProtocol):
    """One websocket connection.

    A close is sent past whatever waits to be read, and ``LINGER_S`` later the connection is cut: with a full
    buffer it would otherwise stay as long as TCP hopes. A message beyond the limit is refused from its head;
    what is still coming is read and thrown away meanwhile, since closing on unread data would reset the
    connection before the client has seen the reason.
    """

    async def send(self, message: Any) -> None:
        closing = message["type"] == "websocket.close" and self.handshake_complete
        if closing:
            self.writable.set()
        await super().send(message)
        if closing:
            self._cut_soon()

    def data_received(self, data: bytes) -> None:
        if self.conn.parser_exc is None:
            super().data_received(data)
        # else: it was told that it is closed, and what it still sends is not even looked at

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is not None:
            ended = {"type": "websocket.disconnect", "code": self.conn.close_sent.code, "reason": ""}
            self.queue.put_nowait(ended)  # type: ignore[arg-type]
        self.stop_keepalive()
        self._write()
        self.close_sent = True
        self.read_paused = False
        self.transport.resume_reading()
        self._cut_soon()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._cut_soon()

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent and not self.disconnected:
            self.stop_keepalive()
            self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY, "reason": ""})
            with suppress(InvalidState):  # the client may be closing itself
                self.conn.send_close(GOING_AWAY)
            self._write()
            self.transport.close()
            self._cut_soon()
        else:
            super().shutdown()

    def _write(self) -> None:
        self.transport.write(b"".join(self.conn.data_to_send()))

    def _cut_soon(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)
