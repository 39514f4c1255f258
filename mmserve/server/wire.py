"""uvicorn's HTTP/1.1, with our errors for what is not HTTP, and an end to requests that never begin."""

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmserve.core.errors import InvalidRequest, MMServeError
from mmserve.server.errors import RequestTimeout, error_body


class Wire(H11Protocol):
    """One connection. A request's head has ``head_s`` seconds from its first byte, or from the connection.

    Between requests uvicorn's own limit on idle connections holds; a body's pace is the door's matter.
    """

    def __init__(self, *args: Any, head_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_s = head_s
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("this is not an HTTP/1.1 request that can be read", code="invalid_http"))

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self._head_s, self._give_up)

    def _forget_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._refuse(RequestTimeout(f"no request arrived within {self._head_s:g} s"))

    def _refuse(self, error: MMServeError) -> None:
        """Answer if nothing has been answered yet, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_body(error))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
