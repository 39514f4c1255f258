"""/v1/cameras: cameras that this server pulls, and all others of the caller's, however they come.

    {"url": "rtsp://user:secret@camera.example/stream", "policy": {"fps": 1}}      → {"id": "camera-...", ...}
    /v1/realtime?camera=camera-...                                                 asks about it

A camera belongs to the API key that brought it. One that has ended is told of for a minute more.
"""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta, Struct
from starlette.responses import Response

from mmserve.core.errors import InvalidRequest, MediaError
from mmserve.live.cameras import Camera, Cameras
from mmserve.live.policy import SessionPolicy
from mmserve.live.sources.url import CameraUrl, checked
from mmserve.server.errors import UnsupportedMediaType
from mmserve.server.protocol import convert, read_json
from mmserve.server.reply import reply

router = APIRouter()

Name = Annotated[str, Meta(min_length=1, max_length=64)]


class CameraRequest(Struct, kw_only=True):
    """Body of POST /v1/cameras. A file begins anew at its end with ``loop``."""

    url: str
    loop: bool = False
    name: Name | None = None
    instructions: str | None = None
    policy: dict[str, Any] | None = None


class SentFields(Struct, kw_only=True):
    """What the query of a camera that is sent may say beside the fields of its policy."""

    name: Name | None = None
    instructions: str | None = None


@router.post("/v1/cameras")
async def pull(request: Request) -> Response:
    if "content-type" not in request.headers:  # a page of another site may post what has none, unasked
        raise UnsupportedMediaType("the content type must be application/json")
    body = await read_json(request, CameraRequest)
    config = request.app.state.config
    if not config.cameras.pull_cameras:
        raise InvalidRequest(
            "this server pulls no cameras (pull_cameras is off); send yours to /v1/whip or /v1/mjpeg",
            param="url",
            code="pulling_is_off",
        )
    policy = named(SessionPolicy.of, body.policy or {}, prefix="policy.")
    try:
        url = CameraUrl.read(body.url)
        await checked(url, config.media, config.cameras)
    except MediaError as error:
        error.param = "url"
        raise
    cameras: Cameras = request.app.state.cameras
    camera = await cameras.open(
        "pull",
        request.scope["owner"],
        policy,
        instructions=body.instructions,
        name=body.name,
        url=url.shown,
    )
    cameras.pull(camera, body.url, body.loop)
    answer = reply(camera.card())
    answer.status_code, answer.headers["location"] = 201, f"/v1/cameras/{camera.id}"
    return answer


@router.get("/v1/cameras")
async def list_cameras(request: Request) -> Response:
    """The caller's own cameras, the eldest first."""
    found = request.app.state.cameras.of(request.scope["owner"])
    return reply({"object": "list", "data": [camera.card() for camera in found]})


@router.get("/v1/cameras/{key}")
async def get_camera(request: Request, key: str) -> Response:
    camera = request.app.state.cameras.get(request.scope["owner"], key)
    return reply({**camera.card(), "session": camera.session.stats()})


@router.delete("/v1/cameras/{key}")
async def delete_camera(request: Request, key: str) -> Response:
    cameras: Cameras = request.app.state.cameras
    camera = cameras.get(request.scope["owner"], key)
    await cameras.end(camera, "it was deleted")
    return reply({"id": camera.id, "object": "camera", "deleted": True})


async def sent(request: Request, kind: Any) -> Camera:
    """A camera that is sent, not pulled; its query names it and holds its policy."""
    values = dict(request.query_params)
    own = {name: values.pop(name) for name in SentFields.__struct_fields__ if name in values}
    fields = convert(own, SentFields, strict=False)
    policy = named(_loose_policy, values)
    cameras: Cameras = request.app.state.cameras
    owner = request.scope["owner"]
    return await cameras.open(kind, owner, policy, instructions=fields.instructions, name=fields.name)


def _loose_policy(values: dict[str, str]) -> SessionPolicy:
    """A policy whose values are all text."""
    unknown = sorted(set(values) - set(SessionPolicy.__struct_fields__))
    if unknown:
        return SessionPolicy.of(values)  # which says so
    kinds = {field.name: field.type for field in msgspec.structs.fields(SessionPolicy)}
    read = {}
    for name, value in values.items():
        try:
            read[name] = msgspec.convert(value, kinds[name], strict=False)
        except msgspec.ValidationError:
            read[name] = value  # of the wrong type, which is told
    return SessionPolicy.of(read)


def named(make: Any, values: Any, prefix: str = "") -> SessionPolicy:
    """The policy that ``make`` makes; its errors name the field as the caller wrote it."""
    try:
        policy: SessionPolicy = make(values)
    except InvalidRequest as error:
        error.param = f"{prefix}{error.param}" if error.param else None
        raise
    return policy
