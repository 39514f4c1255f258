"""The HTTP application: routes, errors and the door in front of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from mmserve import __version__
from mmserve.core.config import Config
from mmserve.generation import Generator
from mmserve.media import MediaDesk
from mmserve.server import (
    captions,
    chat,
    completions,
    errors,
    health,
    library,
    metrics,
    models,
    realtime,
    responses,
    tokenize,
)
from mmserve.server.door import Door
from mmserve.server.drain import Drain
from mmserve.server.health import Readiness
from mmserve.server.response_store import ResponseStore
from mmserve.server.schema import describe_bodies
from mmserve.server.socket_door import origins_of


def create_app(service: Generator, config: Config) -> FastAPI:
    """The application over a loaded ``service``; the caller closes the service after the server ended."""
    app = FastAPI(title="mmserve", version=__version__, lifespan=_living)
    app.state.service = service
    app.state.config = config
    app.state.drain = Drain()
    app.state.readiness = Readiness(service, app.state.drain)
    app.state.responses = ResponseStore(most_bytes=config.server.response_store_mib << 20)
    app.state.desk = MediaDesk(config.media, service.library, service.metrics)
    app.state.links = set()
    rest = (chat, responses, completions, tokenize, captions, library, models, health, metrics)
    for part in (*rest, realtime):
        app.include_router(part.router)
    errors.install(app)
    describe_bodies(app)
    origins = origins_of(config.realtime.allow_origins)
    app.add_middleware(Door, options=config.server, drain=app.state.drain, origins=origins)
    return app


@asynccontextmanager
async def _living(app: FastAPI) -> AsyncIterator[None]:
    """While the application runs, probe pictures prove it ready, again after each restart of the engine.

    The desk's connections are closed at the end.
    """
    probe = asyncio.create_task(app.state.readiness.watch())
    try:
        yield
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        await app.state.desk.close()
