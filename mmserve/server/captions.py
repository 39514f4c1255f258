"""POST /v1/captions: a picture or clip in, one sentence about it out.

    curl -F image=@photo.jpg http://localhost:8000/v1/captions

The picture comes as a form's file, as the raw body, or as a URL in JSON; the caption goes as JSON, as
plain text (``Accept: text/plain``) or as server-sent events (``stream`` or ``Accept: text/event-stream``).
"""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import PlainTextResponse, Response

from mmserve.caption import MAX_TOKENS, caption_chat
from mmserve.chat_format import MediaRef
from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput, ImagePart, TextOutput, VideoPart
from mmserve.generation import Generator, generate, whole
from mmserve.media import fetch_media, media_part
from mmserve.server.attend import attended
from mmserve.server.errors import UnsupportedMediaType
from mmserve.server.models import check_model
from mmserve.server.protocol import CaptionRequest, convert, read_json
from mmserve.server.sampling import sampling_params
from mmserve.server.stream import EventStream, event
from mmserve.server.usage import timings_body, usage_body

router = APIRouter()
Media = ImagePart | VideoPart
FILES = ("image", "video", "file")
SOURCES = ("image_url", "image", "video_url", "video")


@router.post("/v1/captions")
async def captions(request: Request) -> Response:
    wanted, upload = await _read(request)
    state, accept = request.app.state, request.headers.get("accept", "")
    check_model(state.service, wanted.model)
    job = CaptionJob(state.service, wanted, upload, state.config.media, request.scope["started"])
    if wanted.stream or "text/event-stream" in accept:
        return EventStream(job.events())
    body = await attended(request.receive, job.complete())
    if "text/plain" in accept:
        return PlainTextResponse(body["caption"] + "\n")
    return Response(msgspec.json.encode(body), media_type="application/json")


class CaptionJob:
    """One caption request, to be answered whole or as a stream."""

    def __init__(
        self,
        service: Generator,
        wanted: CaptionRequest,
        upload: Media | None,
        limits: MediaOptions,
        started: float,
    ) -> None:
        self.service, self.wanted, self.upload = service, wanted, upload
        self.limits, self.started = limits, started
        self.id = f"caption-{uuid.uuid4().hex}"
        self.sampling = sampling_params(
            wanted,
            {"temperature": 0.0},
            max_tokens=wanted.max_tokens or MAX_TOKENS,
        )

    async def complete(self) -> dict[str, Any]:
        answer = await whole(self.service, await self._chat())
        return {
            "id": self.id,
            "model": self.service.model_name,
            "caption": answer.text.strip(),
            "finish_reason": answer.finish_reason,
            "usage": usage_body([answer.usage]),
            "timings": timings_body(answer.timings, self.started),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """``{"delta": text}`` events, then one with the whole caption, usage and timings."""
        texts: list[str] = []
        async with aclosing(generate(self.service, [await self._chat()])) as outputs:
            async for _, output in outputs:
                texts.append(output.text)
                if output.text:
                    yield event({"delta": output.text})
                if output.finish_reason:
                    yield event(self._summary("".join(texts), output))

    def _summary(self, text: str, last: TextOutput) -> dict[str, Any]:
        return {
            "id": self.id,
            "model": self.service.model_name,
            "caption": text.strip(),
            "finish_reason": last.finish_reason,
            "usage": usage_body([last.usage]),
            "timings": timings_body(last.timings, self.started),
        }

    async def _chat(self) -> ChatInput:
        media = self.upload or await _fetched(self.wanted, self.limits)
        return caption_chat(self.id, media, self.wanted.prompt, self.sampling, self.wanted.stop_texts())


async def _read(request: Request) -> tuple[CaptionRequest, Media | None]:
    """The request's fields, and its picture or clip if that came with it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _read_form(request)
    if kind.startswith(("image/", "video/")) or kind == "application/octet-stream":
        return CaptionRequest(), _upload(await request.body(), "body")
    if kind and "json" not in kind:
        raise UnsupportedMediaType(
            "send multipart/form-data with an 'image' file, JSON with an image_url, "
            f"or the picture itself as image/*; not {kind}"
        )
    return await read_json(request, CaptionRequest), None


async def _read_form(request: Request) -> tuple[CaptionRequest, Media | None]:
    async with request.form() as form:
        files = [(k, v) for k, v in form.multi_items() if isinstance(v, UploadFile)]
        fields = {k: v for k, v in form.multi_items() if isinstance(v, str)}
        wanted = convert(fields, CaptionRequest)
        given = [(k, v) for k, v in files if k in FILES]
        if not given:
            return wanted, None
        if len(given) + len(_sources(wanted)) > 1:
            raise InvalidRequest("give one picture or clip, not several", param=given[-1][0])
        [(name, file)] = given
        return wanted, _upload(await file.read(), name)


def _upload(data: bytes, param: str) -> Media:
    if not data:
        raise InvalidRequest(f"{param} is empty; send the bytes of a picture or clip", param=param)
    return _part(data, param)


async def _fetched(wanted: CaptionRequest, limits: MediaOptions) -> Media:
    """The picture or clip that exactly one of the fields of SOURCES names."""
    given = _sources(wanted)
    if len(given) != 1:
        raise InvalidRequest(
            f"give one picture or clip: a file 'image', or one of {', '.join(SOURCES)}; not {len(given)}",
            param=given[1] if given else "image",
        )
    source = _source(getattr(wanted, given[0]), given[0])
    kind: Literal["image", "video"] = "video" if given[0].startswith("video") else "image"
    data = await fetch_media(MediaRef(kind, source, given[0]), limits)
    return _part(data, given[0])


def _sources(wanted: CaptionRequest) -> list[str]:
    return [name for name in SOURCES if getattr(wanted, name) is not None]


def _part(data: bytes, param: str) -> Media:
    """What a video field holds is a clip, even a GIF; elsewhere the file itself tells."""
    return VideoPart(data=data, param=param) if param.startswith("video") else media_part(data, param)


def _source(value: Any, param: str) -> str:
    """The URL of a string or ``{"url": ...}``; a bare string of base64 becomes a data URL."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{param} must be a URL or base64 data", param=param)
    is_url = param.endswith("_url") or url.startswith("data:") or "://" in url[:16]
    return url if is_url else f"data:application/octet-stream;base64,{url}"
