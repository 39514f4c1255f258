"""POST /tokenize and POST /detokenize: what texts are to the model.

A raw ``prompt`` is read as /v1/completions reads it: reserved tokens count. In ``messages`` they do not,
as in /v1/chat/completions: what users write stays their words. Media are neither fetched nor decoded: each
picture and clip stands as its one placeholder token, and ``media`` tells how many there are. What one
costs in tokens is told by POST /v1/media?dry_run=1.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import APIRouter, Request
from msgspec import Struct

from mmserve.chat_format import Loaded, MediaRef, parse_messages
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput, ImagePart, SamplingParams, VideoPart
from mmserve.generation import Generator
from mmserve.preprocess.processor import Processor
from mmserve.server.models import check_model
from mmserve.server.protocol import TokenId, read_json

router = APIRouter()


class Tokenizing(Generator, Protocol):
    """What these endpoints ask of ``mmserve.service.Service`` beside generation."""

    processor: Processor

    def tokenize(self, text: str) -> list[int]: ...
    def detokenize(self, token_ids: list[int]) -> str: ...


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a ``prompt`` or ``messages``."""

    prompt: str | None = None
    messages: list[Any] | None = None
    model: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    wanted = await read_json(request, TokenizeRequest)
    service = request.app.state.service
    check_model(service, wanted.model)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise InvalidRequest("give either a prompt or messages", param="prompt")
    return await asyncio.to_thread(_tokenized, service, wanted)


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    wanted = await read_json(request, DetokenizeRequest)
    service = request.app.state.service
    check_model(service, wanted.model)
    chat = ChatInput(request_id="", messages=(), sampling=SamplingParams(), prompt=tuple(wanted.tokens))
    try:
        tokens = await asyncio.to_thread(service.processor.chat_tokens, chat)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="tokens") from None
    return {"prompt": await asyncio.to_thread(service.detokenize, tokens)}


def _tokenized(service: Tokenizing, wanted: TokenizeRequest) -> dict[str, Any]:
    if wanted.prompt is not None:
        tokens, media = service.tokenize(wanted.prompt), 0
    else:
        chat = _chat(wanted.messages or (), wanted)
        tokens = service.processor.chat_tokens(chat)
        media = sum(isinstance(p, ImagePart | VideoPart) for m in chat.messages for p in m.content)
    body = {"count": len(tokens), "tokens": tokens, "media": media}
    if wanted.return_token_strs:
        body["token_strs"] = [service.detokenize([token]) for token in tokens]
    return body


def _chat(messages: Sequence[Mapping[str, Any]], wanted: TokenizeRequest) -> ChatInput:
    return ChatInput(
        request_id="",
        messages=parse_messages(messages, _unfetched),
        sampling=SamplingParams(),
        add_generation_prompt=wanted.add_generation_prompt is not False,
        template_kwargs=wanted.chat_template_kwargs or {},
    )


def _unfetched(ref: MediaRef) -> Loaded:
    return Loaded(b"")
