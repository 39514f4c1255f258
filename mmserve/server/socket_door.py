"""What the door does for websockets: the key in either form, the page's origin, refusals that can be read.

A browser cannot read the status of a refused upgrade. So whoever is refused is let in to be told: an
``error`` event, then a close with a code that says why.
"""

import logging
import time
from urllib.parse import quote, urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from mmserve.core.config import listed
from mmserve.core.errors import InvalidRequest, MMServeError
from mmserve.server.errors import Stopping, error_body

access = logging.getLogger("mmserve.access")

FRAMES = "mmserve.frames.v1"  # binary messages may have a header (``realtime_frames``)
SUBPROTOCOLS = (FRAMES, "realtime")  # those that are spoken here, the most telling one first
KEY_PREFIX = "openai-insecure-api-key."

GOING_AWAY, POLICY, INTERNAL, OVERLOADED = 1001, 1008, 1011, 1013
NO_KEY, IDLE, TOO_MANY = 4401, 4408, 4429
_CODES = {401: NO_KEY, 429: TOO_MANY, 500: INTERNAL, 503: OVERLOADED}
LONGEST_REASON = 120  # bytes; a close frame has room for 123
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class OriginRefused(InvalidRequest):
    """A page of another site: browsers let any page connect, and leave it to the server to look."""

    status = 403
    code = "origin_refused"


class SocketVisit:
    """One websocket on its way through the door, and what the access log will say of it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, visit_id: str) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.id = scope["request_id"] = visit_id
        self.started = time.monotonic()
        self.code: int | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "websocket.disconnect" and self.code is None:
            self.code = message.get("code")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.close":
            self.code = message["code"]
        await self._send(message)

    async def refuse(self, error: MMServeError) -> None:
        await self.receive()  # that it connects
        chosen = subprotocol(self.scope["subprotocols"])
        await self.send({"type": "websocket.accept", "subprotocol": chosen, "headers": []})
        await self.send({"type": "websocket.send", "text": error_text(error, None, "event_0")})
        await self.send(
            {"type": "websocket.close", "code": close_code(error), "reason": fitting(error.message)}
        )

    def log(self) -> None:
        seconds = time.monotonic() - self.started
        path = quote(self.scope["path"])
        access.info("WS %.200s %d %.3fs %s", path, self.code or 1006, seconds, self.id)


def shown_key(scope: Scope) -> str | None:
    """The key in the header, or among the subprotocols, where browsers can put it; None without any."""
    kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    for offered in scope.get("subprotocols", ()):
        if offered.startswith(KEY_PREFIX):
            return str(offered).removeprefix(KEY_PREFIX)
    return None


def subprotocol(offered: list[str]) -> str | None:
    """Which of those that a client offers is spoken; never one that holds a key."""
    return next((name for name in SUBPROTOCOLS if name in offered), None)


def origins_of(allow_origins: str | None) -> tuple[str, ...]:
    """The sites that the option names."""
    return tuple(origin.rstrip("/") for origin in listed(allow_origins))


def check_origin(scope: Scope, allowed: tuple[str, ...], keyed: bool) -> None:
    """OriginRefused for a browser's page that may not connect; other clients send no origin.

    Without ``allowed`` sites: every page where a key is asked for, which the page must have; else those of
    this host and of the reader's own machine, since a key is all that keeps the rest of the web out.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed or (keyed and not allowed):
        return
    try:
        site = urlsplit(origin)
        ours = not allowed and (site.netloc == headers.get("host") or site.hostname in _LOOPBACK)
    except ValueError:
        ours = False
    if not ours:
        raise OriginRefused(f"pages of {origin[:200]} may not connect; see allow_origins", param="origin")


def close_code(error: MMServeError) -> int:
    """The code that tells a client what kind of ``error`` ended its connection."""
    return GOING_AWAY if isinstance(error, Stopping) else _CODES.get(error.status, POLICY)


def fitting(reason: str) -> str:
    """``reason`` cut to what a close frame can hold."""
    return reason.encode()[:LONGEST_REASON].decode(errors="ignore")


def error_text(error: MMServeError, about: str | None, event_id: str) -> str:
    """An ``error`` event; ``about`` is the client's own id of the event that was wrong."""
    told = {**error_body(error)["error"], "event_id": about}
    return msgspec.json.encode({"type": "error", "event_id": event_id, "error": told}).decode()
