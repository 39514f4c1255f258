"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response

from mmserve.core.messages import ChatInput, Message, PromptLogprobs, TextLogprob, TextOutput, Timings, Usage
from mmserve.generation import Generator, merged
from mmserve.media import MediaDesk
from mmserve.parsing.toolbox import read_toolbox
from mmserve.server.conversation import conversation
from mmserve.server.deadline import deadline, fetched_by
from mmserve.server.forms import form_of, form_with_tools
from mmserve.server.models import check_model
from mmserve.server.parsed import Piece, parsed
from mmserve.server.prompt_logprobs import LEAST_LOGPROB, prompt_logprobs_body
from mmserve.server.protocol import ChatRequest, read_json
from mmserve.server.reply import answered
from mmserve.server.report import media_body
from mmserve.server.sampling import reseeded, sampling_params
from mmserve.server.spoken import Delta, Spoken
from mmserve.server.usage import timings_body, usage_body

router = APIRouter()
encode = msgspec.json.encode


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    wanted = await read_json(request, ChatRequest)
    state = request.app.state
    check_model(state.service, wanted.model)
    wanted.check()
    job = ChatJob(state.service, state.desk, wanted, request.scope["owner"], request.scope["started"])
    return await answered(request, job, wanted.stream)


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
        self.tools = read_toolbox(wanted.tools, wanted.tool_choice, wanted.parallel_tool_calls)
        self.template_kwargs = wanted.template_kwargs(self.tools)
        template = service.spec.chat_template
        form = form_of(wanted.response_format, wanted.structured_outputs)
        self.sampling = sampling_params(
            wanted,
            service.spec.sampling,
            max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
            logprobs=(wanted.top_logprobs or 0) if wanted.logprobs else None,
            prompt_logprobs=wanted.prompt_logprobs,
            form=form_with_tools(form, self.tools, template),
            thinking_budget=wanted.budget(template),
        )

    async def complete(self) -> dict[str, Any]:
        chats = await self._chats()
        choices = [Choice() for _ in chats]
        logprobs: list[list[TextLogprob]] = [[] for _ in chats]
        prompt: PromptLogprobs | None = None
        async with aclosing(self._pieces(chats)) as pieces:
            async for index, piece in pieces:
                choices[index].take(piece)
                logprobs[index] += piece.output.logprobs or ()
                prompt = piece.output.prompt_logprobs or prompt
        extra = {} if prompt is None else {"prompt_logprobs": await prompt_logprobs_body(prompt)}
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": [
                choice.body(i, logprobs[i] if self.wanted.logprobs else None)
                for i, choice in enumerate(choices)
            ],
            "usage": usage_body([choice.usage for choice in choices]),
            "timings": timings_body(choices[0].timings, self.started),
            **extra,
            **media_body(chats[0].messages, choices[0].last.media, self.include),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's SSE events: for each choice its role, deltas and reason to end; last the usage.

        Log-probabilities are those of all tokens, of thoughts, calls and tags too: they come when the tokens
        do, with the first delta of that moment, or with an empty one where nothing is certain yet.
        What was seen of the media comes with the usage; where neither was asked for, warnings come with
        the reason to end.
        """
        chunks = Chunks(self.id, self.created, self.service.model_name, self.wanted.include_usage)
        choices = [Choice() for _ in range(self.count)]
        seen: dict[str, Any] = {}
        chats = await self._chats()
        async with aclosing(self._pieces(chats)) as pieces:
            async for index, piece in pieces:
                choice = choices[index]
                data = b"" if choice.begun else chunks.role(index)
                data += chunks.said(index, choice.take(piece), piece.output.logprobs)
                if choice.finish_reason:
                    seen = media_body(chats[index].messages, piece.output.media, self.include)
                    data += chunks.end(index, choice.finish_reason, {} if self._has_last else seen)
                if data:
                    yield data
        if self._has_last:
            usages = [choice.usage for choice in choices]
            yield chunks.last(usages, timings_body(choices[0].timings, self.started), seen)

    def _pieces(self, chats: Sequence[ChatInput]) -> AsyncGenerator[tuple[int, Piece], None]:
        return merged([parsed(self.service, chat, self.tools) for chat in chats])

    @property
    def _has_last(self) -> bool:
        """Whether the stream ends with a chunk that is no choice's."""
        return self.wanted.include_usage or bool(self.include)

    async def _chats(self) -> list[ChatInput]:
        wanted = self.wanted
        async with fetched_by(deadline(self.started, wanted.deadline_ms)):
            messages = await conversation(wanted.messages, self.desk, self.owner, self.defaults)
        return [self._chat(messages, i) for i in range(self.count)]

    def _chat(self, messages: tuple[Message, ...], index: int) -> ChatInput:
        wanted, sampling = self.wanted, reseeded(self.sampling, index)
        return ChatInput(
            request_id=f"{self.id}-{index}",
            messages=messages,
            sampling=replace(sampling, prompt_logprobs=None) if index else sampling,
            stop=wanted.stop_texts(),
            add_generation_prompt=wanted.add_generation_prompt is not False,
            template_kwargs=self.template_kwargs,
            owner=self.owner,
            priority=wanted.priority or 0,
            deadline=deadline(self.started, wanted.deadline_ms),
            cache_salt=wanted.cache_salt,
        )


class Choice:
    """One of a request's answers, as far as it has come."""

    def __init__(self) -> None:
        self.spoken = Spoken()
        self.last = TextOutput(request_id="", text="")
        self.begun = False
        self.timings: Timings | None = None

    def take(self, piece: Piece) -> list[Delta]:
        """The deltas of its next piece."""
        self.begun, self.last = True, piece.output
        self.timings = piece.output.timings or self.timings
        return self.spoken.take(piece.events)

    @property
    def usage(self) -> Usage:
        return self.last.usage

    @property
    def finish_reason(self) -> str | None:
        return self.spoken.finish_reason(self.last.finish_reason)

    def body(self, index: int, logprobs: Sequence[TextLogprob] | None) -> dict[str, Any]:
        return {
            "index": index,
            "message": self.spoken.message(),
            "logprobs": None if logprobs is None else logprobs_body(logprobs),
            "finish_reason": self.finish_reason,
        }


class Chunks:
    """Writes chat.completion.chunk events; all that stays the same is serialised once."""

    def __init__(self, answer_id: str, created: int, model: str, with_usage: bool) -> None:
        head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self.head = b"data: " + encode(head)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def role(self, index: int) -> bytes:
        return self._event(index, b'{"role":"assistant","content":""}', b"null", b"null")

    def said(self, index: int, deltas: list[Delta], logprobs: Sequence[TextLogprob] | None) -> bytes:
        """The chunks of ``deltas``; all of ``logprobs`` go with the first."""
        details = encode(logprobs_body(logprobs)) if logprobs else b"null"
        deltas = deltas or ([{}] if logprobs else [])
        events = [
            self._event(index, encode(delta), b"null" if number else details, b"null")
            for number, delta in enumerate(deltas)
        ]
        return b"".join(events)

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
