"""Starting and ending the service: bind, load, listen, prove ready, drain."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from mmserve.core.config import Config
from mmserve.core.errors import ConfigError
from mmserve.server.app import create_app
from mmserve.server.health import Readiness
from mmserve.server.wire import Wire

if TYPE_CHECKING:
    from mmserve.service import Service


def serve(config: Config) -> int:
    """Serve until SIGTERM or ctrl-C, then let running requests finish for ``drain_s`` seconds.

    The address is taken before the model is loaded, so that a port in use fails at once; it answers
    only after the model is loaded.
    """
    set_up_logging()
    with bound(config.server.host, config.server.port) as listener, leaving_on_sigterm():
        from mmserve.service import Service

        service = Service.load(config)
        try:
            asyncio.run(_run(service, config, listener))
        except KeyboardInterrupt:
            pass
        finally:
            service.close()
    return 0


async def _run(service: "Service", config: Config, listener: socket.socket) -> None:
    app = create_app(service, config)
    server = uvicorn.Server(server_config(app, config))
    banner = asyncio.create_task(_announce(app.state.readiness, service.model_name, config, listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        banner.cancel()


def server_config(app: object, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=partial(Wire, head_s=config.server.body_idle_s),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=config.server.drain_s,
    )


async def _announce(readiness: Readiness, model: str, config: Config, listener: socket.socket) -> None:
    await readiness.proven.wait()
    url = base_url(listener)
    key = ' -H "Authorization: Bearer $API_KEY"' if config.server.api_key else ""
    print(f"mmserve: {model} is ready at {url} (OpenAI base URL: {url}/v1)", flush=True)
    print(f"try:  curl{key} -F image=@photo.jpg {url}/v1/captions", flush=True)


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


def base_url(listener: socket.socket) -> str:
    """The URL under which this machine reaches ``listener``."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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


def set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpcore", "uvicorn", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
