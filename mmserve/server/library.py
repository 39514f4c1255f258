"""/v1/media: pictures and clips that are sent once and asked about many times.

    curl -F image=@photo.jpg http://localhost:8000/v1/media                → {"id": "media-...", ...}
    {"type": "media", "media_id": "media-..."}                             as a part of a chat

What is stored belongs to the API key that brought it; nobody else can see it, use it or remove it. With
``dry_run`` nothing is kept, and the answer tells what the picture or clip would cost.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mmserve.core.errors import InvalidRequest, NotFound
from mmserve.core.messages import Seen
from mmserve.media import NOT_FOUND
from mmserve.preprocess.library import StoredMedia
from mmserve.preprocess.source import Content
from mmserve.server.attend import attended
from mmserve.server.reply import reply
from mmserve.server.report import seen_body
from mmserve.server.upload import Sent, incoming, sent

router = APIRouter()
TRUE, FALSE = ("1", "true", "yes", ""), ("0", "false", "no")


@router.post("/v1/media")
async def store(request: Request) -> Response:
    dry = _dry(request.query_params.get("dry_run", "0"))
    body = await incoming(request)
    return reply(await attended(request.receive, _kept(request, body, dry)))


@router.get("/v1/media")
async def list_media(request: Request) -> Response:
    """The caller's own media, the least recently used first."""
    kept = request.app.state.service.library.list(request.scope["owner"])
    return reply({"object": "list", "data": [_card(media) for media in kept]})


@router.get("/v1/media/{media_id}")
async def get_media(request: Request, media_id: str) -> Response:
    service = request.app.state.service
    media = service.library.get(request.scope["owner"], media_id)
    if media is None:
        raise _unknown(media_id)
    seen = await attended(
        request.receive, service.look(Sent(media.data, media.kind, media.options, "media_id").part())
    )
    return reply({**_card(media), **_measured(seen)})


@router.delete("/v1/media/{media_id}")
async def delete_media(request: Request, media_id: str) -> Response:
    if not request.app.state.service.library.delete(request.scope["owner"], media_id):
        raise _unknown(media_id)
    return reply({"id": media_id, "object": "media", "deleted": True})


async def _kept(request: Request, body: Any, dry: bool) -> dict[str, Any]:
    """What is told of a new picture or clip, after it was seen; what cannot be seen is not stored."""
    service, owner = request.app.state.service, request.scope["owner"]
    brought = await sent(body, request.app.state.desk, owner)
    seen = await service.look(brought.part())
    if dry:
        told = {
            "object": "media",
            "dry_run": True,
            "bytes": _size(brought.data),
            "options": dict(brought.options),
        }
        return {**told, **_measured(seen)}
    media = await asyncio.to_thread(
        service.library.put, owner, brought.data, brought.options, kind=brought.kind
    )
    return {**_card(media), **_measured(seen)}


def _card(media: StoredMedia) -> dict[str, Any]:
    return {
        "id": media.id,
        "object": "media",
        "kind": media.kind,
        "bytes": media.nbytes,
        "options": dict(media.options),
        "created_at": int(media.created),
        "expires_at": int(media.expires),
    }


def _measured(seen: Seen) -> dict[str, Any]:
    return {name: value for name, value in seen_body(seen).items() if name != "cached"}


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else sum(map(len, content))


def _dry(text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise InvalidRequest(f"dry_run must be 1 or 0, not {text[:100]!r}", param="dry_run")
    return text.lower() in TRUE


def _unknown(media_id: str) -> NotFound:
    return NotFound(
        f"nothing of yours is stored as {media_id[:100]!r}, or it has expired",
        param="media_id",
        code=NOT_FOUND,
    )
