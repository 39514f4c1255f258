"""POST /v1/responses, and GET and DELETE of what was stored there.

``store`` is on unless it is turned off: a later request can go on from a response by its id for as long as
it is kept (``response_store``). Tools and formats belong to /v1/chat/completions.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mmserve.core.errors import InvalidRequest, MMServeError, NotFound
from mmserve.core.messages import ChatInput, Usage
from mmserve.generation import Generator, generate, whole
from mmserve.media import MediaDesk
from mmserve.media_options import request_options
from mmserve.server.attend import attended
from mmserve.server.conversation import conversation
from mmserve.server.models import check_model
from mmserve.server.protocol import Positive, SamplingFields, read_json
from mmserve.server.response_items import Dialogue
from mmserve.server.response_store import ResponseStore, StoredResponse
from mmserve.server.sampling import sampling_params
from mmserve.server.stream import EventStream

router = APIRouter()
encode = msgspec.json.encode

# What this endpoint cannot honour, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_METADATA = (16, 64, 512)  # pairs, and characters of a key and of a value


class ResponseRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/responses."""

    input: Any
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    text: dict[str, Any] | None = None
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    reasoning: Any = None
    service_tier: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    def check(self) -> None:
        """InvalidRequest for what this endpoint cannot honour."""
        for name, idle in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value not in idle:
                raise _unsupported(name, f"{name} is not supported here")
        if self.max_tokens is not None:
            raise _unsupported("max_tokens", "the limit of an answer is called max_output_tokens here")
        self._check_text()
        self._check_metadata()

    def _check_text(self) -> None:
        wanted = self.text or {}
        form = wanted.get("format") or {"type": "text"}
        if form != {"type": "text"}:
            raise _unsupported(
                "text.format", "text.format must be text; other formats are not supported here"
            )
        if wanted.get("verbosity") not in (None, "medium"):
            raise _unsupported("text.verbosity", "text.verbosity is not supported here")

    def _check_metadata(self) -> None:
        pairs, longest_key, longest_value = _METADATA
        given = self.metadata or {}
        if len(given) > pairs or any(
            len(k) > longest_key or len(v) > longest_value for k, v in given.items()
        ):
            raise InvalidRequest(
                f"metadata may have {pairs} pairs of {longest_key} and {longest_value} characters",
                param="metadata",
            )


@router.post("/v1/responses")
async def create(request: Request) -> Response:
    wanted = await read_json(request, ResponseRequest)
    state = request.app.state
    check_model(state.service, wanted.model)
    wanted.check()
    job = ResponseJob(state.service, state.desk, state.responses, wanted, request.scope["owner"])
    if wanted.stream:
        return EventStream(job.events())
    return _json(await attended(request.receive, job.complete()))


@router.get("/v1/responses/{response_id}")
async def get(request: Request, response_id: str) -> Response:
    stored = request.app.state.responses.get(request.scope["owner"], response_id)
    if stored is None:
        raise _not_stored(response_id)
    return _json(stored.body)


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    if not request.app.state.responses.delete(request.scope["owner"], response_id):
        raise _not_stored(response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


class ResponseJob:
    """One request, to be answered whole or as a stream."""

    def __init__(
        self, service: Generator, desk: MediaDesk, store: ResponseStore, wanted: ResponseRequest, owner: str
    ) -> None:
        self.service, self.desk, self.store = service, desk, store
        self.wanted, self.owner = wanted, owner
        self.id = f"resp_{uuid.uuid4().hex}"
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.dialogue = Dialogue(self._earlier(), wanted.instructions, wanted.input)
        self.defaults = request_options(wanted.mm_processor_kwargs, wanted.media_io_kwargs)
        self.sampling = sampling_params(wanted, service.spec.sampling, max_tokens=wanted.max_output_tokens)

    async def complete(self) -> dict[str, Any]:
        with self.dialogue.naming():
            answer = await whole(self.service, await self._chat())
        return self._finished(answer.text, answer.finish_reason, answer.usage)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's events. The first waits for the model's first word: until then an error is a plain
        answer; later it is ``response.failed``."""
        events, texts = Events(self.item_id), list[str]()
        try:
            with self.dialogue.naming():
                async with aclosing(generate(self.service, [await self._chat()])) as outputs:
                    async for _, output in outputs:
                        data = b"" if events.count else events.begin(self._body("in_progress", []))
                        texts.append(output.text)
                        if output.text:
                            data += events.delta(output.text)
                        if output.finish_reason:
                            body = self._finished("".join(texts), output.finish_reason, output.usage)
                            data += events.end(body)
                        if data:
                            yield data
        except MMServeError as error:
            if not events.count:
                raise
            fault = {"code": "server_error", "message": error.message}
            yield events.event("response.failed", response=self._body("failed", [], error=fault))

    def _earlier(self) -> Any:
        if self.wanted.previous_response_id is None:
            return ()
        stored = self.store.get(self.owner, self.wanted.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                "previous_response_id names no stored response: it was never stored, or is kept no longer",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.messages

    async def _chat(self) -> ChatInput:
        wanted = self.wanted
        return ChatInput(
            request_id=self.id,
            messages=await conversation(self.dialogue.messages, self.desk, self.owner, self.defaults),
            sampling=self.sampling,
            stop=wanted.stop_texts(),
            template_kwargs=wanted.chat_template_kwargs or {},
            priority=wanted.priority or 0,
            cache_salt=wanted.cache_salt,
        )

    # ------------------------------------------------------------ what is answered

    def _finished(self, text: str, reason: str | None, usage: Usage) -> dict[str, Any]:
        """The response as a whole, which is stored if it may be."""
        status = "incomplete" if reason == "length" else "completed"
        item = message_item(self.item_id, status, [text_part(text)])
        body = self._body(status, [item], usage=usage)
        if self.wanted.store is not False:
            said = {"role": "assistant", "content": text}
            stored = StoredResponse(body, (*self.dialogue.kept, said))
            self.store.put(self.owner, self.id, stored)
        return body

    def _body(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        usage: Usage | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        wanted = self.wanted
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": wanted.instructions,
            "max_output_tokens": wanted.max_output_tokens,
            "model": self.service.model_name,
            "output": output,
            "parallel_tool_calls": wanted.parallel_tool_calls is not False,
            "previous_response_id": wanted.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": wanted.store is not False,
            "temperature": self.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": wanted.tool_choice or "auto",
            "tools": [],
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": wanted.user,
            "metadata": wanted.metadata or {},
        }


class Events:
    """Writes the events of one message, in the order that the protocol has."""

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self.count = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self.count, **fields}
        self.count += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(body))

    def begin(self, response: dict[str, Any]) -> bytes:
        item = message_item(self.item_id, "in_progress", [])
        return (
            self.event("response.created", response=response)
            + self.event("response.in_progress", response=response)
            + self.event("response.output_item.added", output_index=0, item=item)
            + self._of_part("response.content_part.added", part=text_part(""))
        )

    def delta(self, text: str) -> bytes:
        return self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, response: dict[str, Any]) -> bytes:
        [item] = response["output"]
        [part] = item["content"]
        return (
            self._of_part("response.output_text.done", text=part["text"], logprobs=[])
            + self._of_part("response.content_part.done", part=part)
            + self.event("response.output_item.done", output_index=0, item=item)
            + self.event(f"response.{response['status']}", response=response)
        )

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self.event(kind, item_id=self.item_id, output_index=0, content_index=0, **fields)


def message_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            "text_tokens": usage.prompt_tokens - usage.image_tokens - usage.video_tokens,
            "image_tokens": usage.image_tokens,
            "video_tokens": usage.video_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")


def _not_stored(response_id: str) -> NotFound:
    return NotFound(f"no response {response_id[:100]!r} is stored here", param="response_id")


def _unsupported(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="unsupported_value")
