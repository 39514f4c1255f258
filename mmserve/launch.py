"""Starting and ending the service: bind, load, listen, prove ready, drain."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from mmserve.core.config import Config
from mmserve.core.errors import ConfigError, EngineDead
from mmserve.core.heap import settle
from mmserve.extension import Extension
from mmserve.logs import set_up_logging
from mmserve.server.app import create_app
from mmserve.server.drain import Drain
from mmserve.server.health import Readiness
from mmserve.server.socket_wire import SocketWire
from mmserve.server.wire import Wire

if TYPE_CHECKING:
    from mmserve.service import Service


LAST_WORDS_S = 3  # for connections to close when all requests have ended


Extend = Callable[[str], Extension]


def serve(config: Config, extend: Extend | None = None) -> int:
    """Serve until SIGTERM or ctrl-C, then let running requests finish for ``drain_s`` seconds.

    The address is taken before the model is loaded, so that a port in use fails at once; it answers
    only after the model is loaded. ``extend`` is told the model's name, and makes an application that is
    served beside the API.
    """
    set_up_logging()
    with bound(config.server.host, config.server.port) as listener, leaving_on_sigterm():
        from mmserve.service import Service

        begin = Service.start if config.server.engine_process else Service.load
        service = begin(config)
        try:
            asyncio.run(_run(service, config, listener, extend and extend(service.model_name)))
        except KeyboardInterrupt:
            pass
        finally:
            service.close()
    return 0


async def _run(service: "Service", config: Config, listener: socket.socket, beside: Extension | None) -> None:
    """Until a signal has come and was heeded; EngineDead when the engine has failed for good."""
    app = create_app(service, config, beside)
    certificate = beside.certificate if beside else None
    settings = server_config(app, config, certificate)
    server = DrainingServer(settings, app.state.drain, config.server.drain_s)
    url = base_url(listener, "https" if certificate else "http")
    tasks = [
        asyncio.create_task(_announce(app.state.readiness, service.model_name, config, url, beside)),
        asyncio.create_task(server.stop_after(asyncio.wrap_future(service.failed))),
    ]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
    if service.failed.done():
        raise EngineDead(service.failed.result())


class DrainingServer(uvicorn.Server):
    """Goes on listening while it drains, so that who comes then is told; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, drain: Drain, drain_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain.begun:
            super().handle_exit(sig, frame)
        else:
            self._drain.begun = True
            self._loop.call_soon_threadsafe(self._begin)

    async def stop_after(self, failure: asyncio.Future[str]) -> None:
        """End when ``failure`` is done; there is nothing left to wait for."""
        await failure
        self.should_exit = True

    def _begin(self) -> None:
        self._draining = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        await self._drain.run(self._drain_s)
        self.should_exit = True


def server_config(
    app: object, config: Config, certificate: tuple[Path, Path] | None = None
) -> uvicorn.Config:
    """How uvicorn is to serve ``app``, over TLS with the files of a ``certificate`` and its key."""
    chain, key = certificate or (None, None)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=partial(Wire, head_s=config.server.body_idle_s),  # type: ignore[arg-type]
        ws=SocketWire,
        ws_max_size=config.realtime.max_message_bytes,
        ws_ping_interval=config.realtime.realtime_ping_s,
        ws_ping_timeout=config.realtime.realtime_ping_s,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ssl_certfile=chain,
        ssl_keyfile=key,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


async def _announce(
    readiness: Readiness, model: str, config: Config, url: str, beside: Extension | None
) -> None:
    await readiness.proven.wait()
    settle()
    key = ' -H "Authorization: Bearer $API_KEY"' if config.server.api_key else ""
    print(f"mmserve: {model} is ready at {url} (OpenAI base URL: {url}/v1)", flush=True)
    print(f"try:  curl{key} -F image=@photo.jpg {url}/v1/captions", flush=True)
    if beside is not None:
        beside.ready(url)


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that owns the address but does not listen yet; ConfigError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param="port") from None
        yield listener


def base_url(listener: socket.socket, scheme: str = "http") -> str:
    """The URL under which this machine reaches ``listener``."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as ctrl-C does, so that everything in it is closed.

    uvicorn takes the signal over while it serves, drains, and raises it again afterwards.
    """

    def leave(number: int, frame: object) -> None:
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
