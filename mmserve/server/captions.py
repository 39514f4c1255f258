"""POST /v1/captions: a picture or clip in, one sentence about it out.

    curl -F image=@photo.jpg http://localhost:8000/v1/captions

The picture comes as a form's file, as the raw body, or as a URL in JSON; the caption goes as JSON, as
plain text (``Accept: text/plain``) or as server-sent events (``stream`` or ``Accept: text/event-stream``).
"""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import PlainTextResponse, Response

from mmserve.caption import MAX_TOKENS, caption_chat
from mmserve.core.messages import ChatInput, TextOutput
from mmserve.generation import Generator
from mmserve.media import MediaDesk
from mmserve.parsing.events import Content
from mmserve.server.attend import attended
from mmserve.server.deadline import deadline, fetched_by
from mmserve.server.forms import form_of
from mmserve.server.models import check_model
from mmserve.server.parsed import Piece, parsed
from mmserve.server.protocol import CaptionRequest, check_include
from mmserve.server.reply import reply
from mmserve.server.report import media_body
from mmserve.server.sampling import sampling_params
from mmserve.server.stream import EventStream, event
from mmserve.server.upload import Incoming, incoming, sent
from mmserve.server.usage import timings_body, usage_body

router = APIRouter()


@router.post("/v1/captions")
async def captions(request: Request) -> Response:
    body = await incoming(request)
    state, accept = request.app.state, request.headers.get("accept", "")
    job = CaptionJob(state.service, state.desk, body, request.scope["owner"], request.scope["started"])
    if job.wanted.stream or "text/event-stream" in accept:
        return EventStream(job.events())
    answer = await attended(request.receive, job.complete())
    if "text/plain" in accept:
        return PlainTextResponse(answer["caption"] + "\n")
    return reply(answer)


class CaptionJob:
    """One caption request, to be answered whole or as a stream."""

    def __init__(
        self, service: Generator, desk: MediaDesk, body: Incoming, owner: str, started: float
    ) -> None:
        self.service, self.desk, self.body = service, desk, body
        self.owner, self.started = owner, started
        self.wanted = body.read(CaptionRequest)
        self.wanted.refuse()
        self.include = self.wanted.includes()
        check_model(service, self.wanted.model)
        check_include(self.include)
        self.id = f"caption-{uuid.uuid4().hex}"
        self.sampling = sampling_params(
            self.wanted,
            {"temperature": 0.0},
            max_tokens=self.wanted.max_tokens or MAX_TOKENS,
            form=form_of(None, self.wanted.structured_outputs),
        )

    async def complete(self) -> dict[str, Any]:
        chat, texts = await self._chat(), list[str]()
        async with aclosing(parsed(self.service, chat)) as pieces:
            async for piece in pieces:
                texts.append(_words(piece))
        return self._summary(chat, "".join(texts), piece.output)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """``{"delta": text}`` events, then one with the whole caption, usage and timings."""
        texts: list[str] = []
        chat = await self._chat()
        async with aclosing(parsed(self.service, chat)) as pieces:
            async for piece in pieces:
                texts.append(_words(piece))
                if texts[-1]:
                    yield event({"delta": texts[-1]})
        yield event(self._summary(chat, "".join(texts), piece.output))

    def _summary(self, chat: ChatInput, text: str, last: TextOutput) -> dict[str, Any]:
        return {
            "id": self.id,
            "model": self.service.model_name,
            "caption": text.strip(),
            "finish_reason": last.finish_reason,
            "usage": usage_body([last.usage]),
            "timings": timings_body(last.timings, self.started),
            **media_body(chat.messages, last.media, self.include),
        }

    async def _chat(self) -> ChatInput:
        wanted = self.wanted
        due = deadline(self.started, wanted.deadline_ms)
        async with fetched_by(due):
            media = (await sent(self.body, self.desk, self.owner)).part()
        chat = caption_chat(self.id, media, wanted.prompt, self.sampling, wanted.stop_texts())
        return replace(chat, owner=self.owner, deadline=due)


def _words(piece: Piece) -> str:
    """What it says to the reader; a caption has no thoughts."""
    return "".join(event.text for event in piece.events if isinstance(event, Content))
