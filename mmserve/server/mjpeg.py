"""/v1/mjpeg: a camera that is uploaded as a body without end, one JPEG after the other.

    ffmpeg -f v4l2 -i /dev/video0 -f mpjpeg -content_type "multipart/x-mixed-replace;boundary=ffmpeg"
           http://localhost:8000/v1/mjpeg?name=porch

The answer comes at the end and counts the frames; meanwhile /v1/realtime?camera=porch asks about it. Frames
are taken out of the body here and not looked into: the session has the latest decoded elsewhere. One beyond
``max_frame_bytes`` is dropped as too_big.
"""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mmserve.core.errors import InvalidRequest
from mmserve.live.cameras import Camera, Cameras
from mmserve.live.frame import Frame
from mmserve.live.sources.messages import Drop
from mmserve.live.sources.mjpeg import KIND, Parts, boundary_of
from mmserve.server.cameras import sent
from mmserve.server.errors import UnsupportedMediaType
from mmserve.server.reply import reply

router = APIRouter()

PATH = "/v1/mjpeg"


class Ended(InvalidRequest):
    """The camera was ended while it was still sending."""

    status = 409
    code = "camera_ended"


@router.post(PATH)
async def upload(request: Request) -> Response:
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise UnsupportedMediaType(f"the content type must be {KIND};boundary=NAME")
    parts = Parts(boundary, request.app.state.config.realtime.max_frame_bytes)
    camera = await sent(request, "mjpeg")
    cameras: Cameras = request.app.state.cameras
    why = "its upload broke off"
    try:
        await _until_ended(camera, _read(request, camera, parts))
        why = "its upload is at its end"
    except InvalidRequest as error:
        why = error.message
        raise
    finally:
        await cameras.end(camera, why)
    return reply({**camera.card(), "session": camera.session.stats()})


async def _read(request: Request, camera: Camera, parts: Parts) -> None:
    """Frames from the body, to its end."""
    seq = 0
    async for data in request.stream():
        received = time.monotonic()
        for jpeg in parts.feed(data):
            seq += 1
            if jpeg is None:
                camera.tally(1, {"too_big": Drop(1, seq, received)})
            else:
                camera.put(Frame(seq=seq, data=jpeg, captured=received, received=received))
        if parts.ended:
            return


async def _until_ended(camera: Camera, reading: Any) -> None:
    """Read until the body or the camera ends; Ended if it is the camera."""
    jobs = [asyncio.ensure_future(reading), asyncio.ensure_future(camera.ended.wait())]
    try:
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        if not jobs[0].done():
            raise Ended(f"the camera was ended: {camera.why}")
        await jobs[0]
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
