"""The HTTP application: routes, errors and the door in front of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse

from mmserve import __version__
from mmserve.core.config import Config
from mmserve.extension import Extension
from mmserve.generation import Generator
from mmserve.live.cameras import Camera, Cameras, Channel
from mmserve.media import MediaDesk
from mmserve.server import (
    cameras,
    captions,
    chat,
    completions,
    errors,
    health,
    library,
    metrics,
    mjpeg,
    models,
    realtime,
    responses,
    static,
    tokenize,
    whip,
)
from mmserve.server.door import Door
from mmserve.server.drain import Drain
from mmserve.server.figures import counted
from mmserve.server.health import Readiness
from mmserve.server.realtime_talk import Talk
from mmserve.server.response_store import ResponseStore
from mmserve.server.schema import describe_bodies
from mmserve.server.socket_door import origins_of


def create_app(service: Generator, config: Config, beside: Extension | None = None) -> FastAPI:
    """The application over a loaded ``service``; the caller closes the service after the server ended.

    ``beside`` is another one, which shares its port.
    """
    app = FastAPI(title="mmserve", version=__version__, lifespan=_living)
    app.state.service = service
    app.state.config = config
    app.state.drain = Drain()
    app.state.readiness = Readiness(service, app.state.drain)
    app.state.responses = ResponseStore(most_bytes=config.server.response_store_mib << 20)
    app.state.desk = MediaDesk(config.media, service.library, service.metrics)
    app.state.cameras = Cameras(service.live, config, lambda: app.state.drain.begun)
    app.state.cameras.converse = partial(_converse, app)
    app.state.links = set()
    app.state.expects_cameras = beside is not None and beside.show_cameras and whip.INSTALLED
    rest = (chat, responses, completions, tokenize, captions, library, models, health, metrics)
    for part in (*rest, realtime, cameras, whip, mjpeg, static):
        app.include_router(part.router)
    errors.install(app)
    describe_bodies(app)
    if beside is not None:
        _mount(app, beside)
    origins = origins_of(config.realtime.allow_origins)
    app.add_middleware(Door, options=config.server, drain=app.state.drain, origins=origins, beside=beside)
    _let_pages_read(app, origins)
    return app


def _mount(app: FastAPI, beside: Extension) -> None:
    def lead(request: Request) -> RedirectResponse:
        return RedirectResponse(beside.path + "/")

    app.add_route("/", lead)
    app.mount(beside.path, beside.app)


def _let_pages_read(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Let pages of these sites read answers. Browsers ask about it without a key, before the door."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["location", "etag", "link", "accept-patch", "x-request-id"],
        )


@asynccontextmanager
async def _living(app: FastAPI) -> AsyncIterator[None]:
    """While the application runs, probe pictures prove it ready, again after each restart of the engine.

    Cameras are looked after; they end, and the desk's connections are closed, at the end.
    """
    if app.state.expects_cameras:
        app.state.cameras.expect()
    jobs = [asyncio.create_task(work) for work in (app.state.readiness.watch(), app.state.cameras.watch())]
    try:
        with counted(app.state.cameras, app.state.links, app.state.service.metrics.registry):
            yield
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await app.state.cameras.close()
        await app.state.desk.close()


def _converse(app: FastAPI, camera: Camera, channel: Channel) -> Talk:
    """What is said over a camera's data channel is what is said over /v1/realtime."""
    state = app.state
    return Talk(state.service, state.desk, state.config.realtime, camera.owner, channel, camera=camera)
