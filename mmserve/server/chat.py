"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mmserve.core.messages import ChatInput, Message, SamplingParams, TextLogprob, Timings, Usage
from mmserve.generation import Answer, Generator, collect, generate
from mmserve.media import MediaDesk
from mmserve.server.attend import attended
from mmserve.server.conversation import conversation
from mmserve.server.models import check_model
from mmserve.server.protocol import ChatRequest, read_json
from mmserve.server.report import media_body
from mmserve.server.sampling import sampling_params
from mmserve.server.stream import EventStream
from mmserve.server.usage import timings_body, usage_body

router = APIRouter()
encode = msgspec.json.encode
LEAST_LOGPROB = -9999.0  # what OpenAI shows for impossible tokens; JSON has no -inf


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    wanted = await read_json(request, ChatRequest)
    state = request.app.state
    check_model(state.service, wanted.model)
    wanted.check()
    job = ChatJob(state.service, state.desk, wanted, request.scope["owner"], request.scope["started"])
    if wanted.stream:
        return EventStream(job.events())
    body = await attended(request.receive, job.complete())
    return Response(encode(body), media_type="application/json")


class ChatJob:
    """One chat completion request, to be answered whole or as a stream."""

    def __init__(
        self, service: Generator, desk: MediaDesk, wanted: ChatRequest, owner: str, started: float
    ) -> None:
        self.service, self.desk, self.wanted = service, desk, wanted
        self.owner, self.started = owner, started
        self.defaults = wanted.media_options()
        self.include = wanted.include or []
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.count = wanted.n or 1
        self.sampling = sampling_params(
            wanted,
            service.spec.sampling,
            max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
            logprobs=(wanted.top_logprobs or 0) if wanted.logprobs else None,
            response_format=wanted.response_format,
        )

    async def complete(self) -> dict[str, Any]:
        chats = await self._chats()
        outputs = generate(self.service, chats)
        answers = await collect(outputs, self.count)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": [_choice(i, answer, self.wanted.logprobs) for i, answer in enumerate(answers)],
            "usage": usage_body([answer.usage for answer in answers]),
            "timings": timings_body(answers[0].timings, self.started),
            **media_body(chats[0].messages, answers[0].media, self.include),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's SSE events: for each choice its role, text and reason to end; last the usage.

        What was seen of the media comes with the usage; where neither was asked for, warnings come with
        the reason to end.
        """
        chunks = Chunks(self.id, self.created, self.service.model_name, self.wanted.include_usage)
        usages, begun = [Usage()] * self.count, [False] * self.count
        timings: list[Timings | None] = [None] * self.count
        seen: dict[str, Any] = {}
        chats = await self._chats()
        async with aclosing(generate(self.service, chats)) as outputs:
            async for index, output in outputs:
                data = b"" if begun[index] else chunks.role(index)
                begun[index] = True
                if output.text or output.logprobs:
                    data += chunks.text(index, output.text, output.logprobs)
                if output.finish_reason:
                    seen = media_body(chats[index].messages, output.media, self.include)
                    data += chunks.end(index, output.finish_reason, {} if self._has_last else seen)
                usages[index], timings[index] = output.usage, output.timings or timings[index]
                if data:
                    yield data
        if self._has_last:
            yield chunks.last(usages, timings_body(timings[0], self.started), seen)

    @property
    def _has_last(self) -> bool:
        """Whether the stream ends with a chunk that is no choice's."""
        return self.wanted.include_usage or bool(self.include)

    async def _chats(self) -> list[ChatInput]:
        wanted = self.wanted
        messages = await conversation(wanted.messages, self.desk, self.owner, self.defaults)
        return [self._chat(messages, i) for i in range(self.count)]

    def _chat(self, messages: tuple[Message, ...], index: int) -> ChatInput:
        wanted = self.wanted
        return ChatInput(
            request_id=f"{self.id}-{index}",
            messages=messages,
            sampling=_reseeded(self.sampling, index),
            stop=wanted.stop_texts(),
            add_generation_prompt=wanted.add_generation_prompt is not False,
            template_kwargs=wanted.chat_template_kwargs or {},
            priority=wanted.priority or 0,
            cache_salt=wanted.cache_salt,
        )


class Chunks:
    """Writes chat.completion.chunk events; all that stays the same is serialised once."""

    def __init__(self, answer_id: str, created: int, model: str, with_usage: bool) -> None:
        head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self.head = b"data: " + encode(head)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def role(self, index: int) -> bytes:
        return self._event(index, b'{"role":"assistant","content":""}', b"null", b"null")

    def text(self, index: int, text: str, logprobs: Sequence[TextLogprob] | None) -> bytes:
        details = encode(logprobs_body(logprobs)) if logprobs else b"null"
        return self._event(index, b'{"content":%b}' % encode(text), details, b"null")

    def end(self, index: int, reason: str, more: dict[str, Any]) -> bytes:
        event = self._event(index, b"{}", b"null", encode(reason))
        return event if not more else event.removesuffix(b"}\n\n") + b"," + encode(more)[1:] + b"\n\n"

    def last(self, usages: Sequence[Usage], timings: dict[str, float | None], more: dict[str, Any]) -> bytes:
        fields = {"usage": usage_body(usages), "timings": timings, **more}
        return self.head + b"]," + encode(fields)[1:] + b"\n\n"

    def _event(self, index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}'
        return self.head + choice % (index, delta, logprobs, reason) + self.tail


def logprobs_body(logprobs: Sequence[TextLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_token(entry.token, entry.logprob),
                "top_logprobs": [_token(token, logprob) for token, logprob in entry.top],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    logprob = max(logprob, LEAST_LOGPROB)
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


def _choice(index: int, answer: Answer, with_logprobs: bool | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": logprobs_body(answer.logprobs) if with_logprobs else None,
        "finish_reason": answer.finish_reason,
    }


def _reseeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The choices of one request differ, and each stays the same for the same seed."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)
