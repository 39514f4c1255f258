"""Server-sent events: written and flushed one by one, with an ordinary error until the first is out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmserve.core.errors import MMServeError
from mmserve.server.attend import attended
from mmserve.server.errors import ClientGone, error_body, told

DONE = b"data: [DONE]\n\n"
LAST_WORDS_S = 1.0  # a client that does not read must not hold up the end of its own request


def event(value: object) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


class EventStream(Response):
    """Sends ``events`` (each one or more whole SSE events) as they come, then ``[DONE]``.

    The status line waits for the first event, so that a request which fails before it gets a plain
    error answer; a later failure becomes an error event. ``events`` is closed on every way out.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.events = events
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await attended(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _body(send, first)
            try:
                async for data in events:
                    await _body(send, data)
            except (Exception, asyncio.CancelledError) as error:
                async with asyncio.timeout(LAST_WORDS_S):
                    await _body(send, event(error_body(told(error))) + DONE, more=False)
                if not isinstance(error, MMServeError):
                    raise
            else:
                await _body(send, DONE, more=False)


async def _body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
