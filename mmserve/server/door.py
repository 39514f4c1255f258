"""The outermost layer of every request: its id, the API key, the size limit and the access log."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from contextlib import nullcontext
from math import inf
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.core.config import ServerOptions
from mmserve.core.digest import framed_digest
from mmserve.core.errors import MMServeError, PayloadTooLarge, Unauthorized
from mmserve.extension import ANONYMOUS, Extension
from mmserve.server.drain import Drain
from mmserve.server.errors import RequestTimeout, error_response, told
from mmserve.server.socket_door import SocketVisit, check_origin, shown_key
from mmserve.server.static import PREFIX

access = logging.getLogger("mmserve.access")
log = logging.getLogger("mmserve.server")

LEAST_RATE = 4096  # bytes a second of a body; slower ones only hold a place
DRAIN_S = 2.0  # a refused client may still be sending; reading on lets it see the answer
ENDLESS = ("/v1/mjpeg",)  # bodies that have no end; their pace is looked after as that of others
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Door:
    """ASGI middleware. Health checks and metrics need no key, and are answered while the server drains;
    everything else but the client for browsers, and what is open of the application ``beside`` the API, needs
    one if one is set."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        drain: Drain,
        origins: tuple[str, ...] = (),
        beside: Extension | None = None,
    ) -> None:
        self.app = app
        self.beside = beside
        self.origins = origins
        self.drain = drain
        self.options = options
        self.owners = {key.encode(): owner_of(key) for key in options.api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            wanted = Headers(scope=scope).get("x-request-id")
            return await self._hold(scope, SocketVisit(scope, receive, send, request_id(wanted)))
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        visit = Visit(scope, receive, send, self.options)
        try:
            scope["owner"] = self._admitted(scope)
            visit.check_announced_size()
        except MMServeError as refusal:
            await visit.refuse(refusal)
        else:
            with nullcontext() if _watching(scope["path"]) else self.drain.inside():
                await self._serve(scope, visit)
        finally:
            visit.log()

    def _admitted(self, scope: Scope) -> str:
        """Who asks, by the key that is shown; Unauthorized if it is none of ours."""
        if _watching(scope["path"]):
            return owner_of(None)
        self.drain.check()
        if not self.owners or scope["path"].startswith(PREFIX):
            return owner_of(None)
        try:
            return self._owner(scope)
        except Unauthorized:
            if self.beside is not None and self.beside.opens(scope):
                return owner_of(None)
            raise

    def _owner(self, scope: Scope) -> str:
        key = shown_key(scope)
        if key is None and self.beside is not None:
            key = self.beside.shown_key(scope)
        if key is None:
            raise Unauthorized("an API key is required: send 'Authorization: Bearer KEY'")
        shown = key.encode()
        owners = [owner for key, owner in self.owners.items() if hmac.compare_digest(shown, key)]
        if not owners:
            raise Unauthorized("the API key is not valid")
        return owners[0]

    async def _hold(self, scope: Scope, visit: SocketVisit) -> None:
        """A websocket, for as long as it is open."""
        try:
            scope["owner"] = self._admitted(scope)
            check_origin(scope, self.origins, keyed=bool(self.owners))
        except MMServeError as refusal:
            await visit.refuse(refusal)
        else:
            with self.drain.inside():
                await self.app(scope, visit.receive, visit.send)
        finally:
            visit.log()

    async def _serve(self, scope: Scope, visit: "Visit") -> None:
        try:
            await self.app(scope, visit.receive, visit.send)
        except ClientDisconnect:
            pass  # it left while it was still sending; nobody is there to be told
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, Exception):
                log.exception("request %s failed", visit.id)
            if visit.status is None:
                await visit.refuse(told(error))


class Visit:
    """One request on its way through the door, and what the access log will say of it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, options: ServerOptions) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        endless = scope["path"] in ENDLESS
        self.limit, self.idle_s = inf if endless else options.max_request_bytes, options.body_idle_s
        self.headers = Headers(scope=scope)
        self.id = scope["request_id"] = request_id(self.headers.get("x-request-id"))
        self.started = scope["started"] = time.monotonic()
        self.status: int | None = None
        self.received = 0
        self.unread = True

    async def receive(self) -> Message:
        """The next message of the body; PayloadTooLarge or RequestTimeout as soon as it passes a limit."""
        message = await self._in_time() if self.unread else await self._next()
        self.received += len(message.get("body", b""))
        if self.received > self.limit:
            await self._drain()
            raise self._too_large()
        return message

    async def _in_time(self) -> Message:
        """The next message, within the silence that is allowed and the least rate of the whole."""
        due = self.started + self.idle_s + self.received / LEAST_RATE
        try:
            async with asyncio.timeout(min(self.idle_s, due - time.monotonic())):
                return await self._next()
        except TimeoutError:
            raise RequestTimeout(
                f"the request body did not arrive in time: no silence over {self.idle_s:g} s, and"
                f" {LEAST_RATE} bytes a second"
            ) from None

    async def _next(self) -> Message:
        message = await self._receive()
        self.unread = message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.id
        await self._send(message)

    def check_announced_size(self) -> None:
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limit:
            raise self._too_large()

    async def refuse(self, error: MMServeError) -> None:
        if "expect" not in self.headers:
            await self._drain()
        await error_response(error)(self.scope, self._receive, self.send)

    def log(self) -> None:
        seconds = time.monotonic() - self.started
        path, status = quote(self.scope["path"]), self.status or 499  # a line break in it would forge a line
        quiet = _watching(path) and status == 200
        access.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %.200s %d %.3fs %s",
            self.scope["method"],
            path,
            status,
            seconds,
            self.id,
        )

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the request body is larger than {self.limit} bytes, the limit of this server"
        )

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                while self.unread:
                    await self._next()
        except TimeoutError:
            pass


def _watching(path: str) -> bool:
    """Whether it is asked by what watches over the server, every few seconds and without a key."""
    return path.startswith("/health/") or path == "/metrics"


def owner_of(api_key: str | None) -> str:
    """Whose the media is that comes with ``api_key``: a name that does not give the key away."""
    return ANONYMOUS if api_key is None else framed_digest("owner", api_key).hex()


def request_id(wanted: str | None) -> str:
    """The caller's own id if it is short printable ASCII, otherwise a new one."""
    return wanted if wanted and _PLAIN_ID.fullmatch(wanted) else f"req-{uuid.uuid4().hex}"
