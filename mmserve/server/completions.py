"""POST /v1/completions: raw prompts continued, as OpenAI's older endpoint does it.

No chat template is applied: reserved tokens of a prompt count, as in ``LLM.generate``. Pictures and clips
go to /v1/chat/completions.
"""

import asyncio
import codecs
import math
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec import Meta
from msgspec.structs import replace
from starlette.responses import Response

from mmserve.core.errors import InvalidRequest, MMServeError
from mmserve.core.messages import (
    ChatInput,
    PromptLogprobs,
    SamplingParams,
    TextLogprob,
    TextOutput,
    Timings,
    Usage,
)
from mmserve.generation import Answer, collect, generate
from mmserve.server.deadline import DeadlineMs, deadline
from mmserve.server.errors import unsupported
from mmserve.server.forms import ResponseFormat, form_of
from mmserve.server.models import check_model
from mmserve.server.prompt_logprobs import LEAST_LOGPROB, prompt_logprobs_body
from mmserve.server.protocol import (
    Alternatives,
    Priority,
    SamplingFields,
    StreamOptions,
    check_best_of,
    read_json,
)
from mmserve.server.reply import answered
from mmserve.server.sampling import reseeded, sampling_params
from mmserve.server.stream import event
from mmserve.server.tokenize import Tokenizing
from mmserve.server.usage import timings_body, usage_body

router = APIRouter()
Prompt = str | tuple[int, ...]

DEFAULT_TOKENS = 16  # OpenAI's, of this endpoint alone
LARGEST_ID = 2**31 - 1


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions. ``prompt`` is a text, token ids, or a list of either."""

    prompt: Any
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    response_format: ResponseFormat | None = None
    suffix: str | None = None
    priority: Priority | None = None
    deadline_ms: DeadlineMs | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """InvalidRequest for fields that contradict each other or that this server cannot honour."""
        if self.suffix:
            raise unsupported("suffix", "this server writes on, it does not fill in; leave suffix out")
        self.refuse()
        check_best_of(self.best_of, self.n)
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs", "prompt_logprobs are not told in a stream; leave stream out")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")

    def prompts(self) -> list[Prompt]:
        """Every prompt, in order."""
        value = self.prompt
        if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
            return [_prompt(value, "prompt")]
        if not isinstance(value, list) or not value:
            raise InvalidRequest("prompt must be a text, token ids, or a list of these", param="prompt")
        return [_prompt(one, f"prompt[{i}]") for i, one in enumerate(value)]


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    wanted = await read_json(request, CompletionRequest)
    state = request.app.state
    check_model(state.service, wanted.model)
    wanted.check()
    owner, started = request.scope["owner"], request.scope["started"]
    job = CompletionJob(state.service, wanted, state.config.scheduler.max_waiting, owner, started)
    return await answered(request, job, wanted.stream)


class CompletionJob:
    """One completion request, to be answered whole or as a stream. Choice ``p * n + i`` is the i-th of the
    p-th prompt; there may be ``most`` of them."""

    def __init__(
        self, service: Tokenizing, wanted: CompletionRequest, most: int, owner: str, started: float
    ) -> None:
        self.service, self.wanted = service, wanted
        self.owner, self.started = owner, started
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.n = wanted.n or 1
        self.prompts = wanted.prompts()
        self.count = self.n * len(self.prompts)
        if self.count > most:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts of {self.n} answers are too many; at most {most} a request",
                param="prompt",
            )
        self.sampling = sampling_params(
            wanted,
            service.spec.sampling,
            max_tokens=wanted.max_tokens or DEFAULT_TOKENS,
            logprobs=wanted.logprobs,
            prompt_logprobs=self._prompt_logprobs(),
            form=form_of(wanted.response_format, wanted.structured_outputs),
        )

    def _prompt_logprobs(self) -> int | None:
        """How many alternatives are told of the prompt; where it is echoed with log-probabilities, as of the
        answer."""
        own = self.wanted.prompt_logprobs
        return self.wanted.logprobs if own is None and self.wanted.echo else own

    async def complete(self) -> dict[str, Any]:
        with _naming_the_prompt():
            answers = await collect(generate(self.service, self._chats()), self.count)
        choices = [await self._whole_choice(i, answers) for i in range(self.count)]
        usages = [answer.usage for answer in answers]
        return {**self._head(), "choices": choices, **self._last(usages, answers[0].timings)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's SSE events; last the usage, if it was asked for."""
        usages, begun = [Usage()] * self.count, [False] * self.count
        timings: list[Timings | None] = [None] * self.count
        spoken = [LegacyLogprobs() for _ in range(self.count)]
        with _naming_the_prompt():
            async with aclosing(generate(self.service, self._chats())) as outputs:
                async for index, output in outputs:
                    echo = "" if begun[index] else self._echo(index)
                    begun[index] = True
                    usages[index], timings[index] = output.usage, output.timings or timings[index]
                    yield await self._chunk(index, output, echo, spoken[index])
        if self._with_usage:
            yield event({**self._head(), "choices": [], **self._last(usages, timings[0])})

    async def _chunk(self, index: int, output: TextOutput, echo: str, spoken: "LegacyLogprobs") -> bytes:
        logprobs = None
        if output.prompt_logprobs is not None:
            logprobs = await asyncio.to_thread(spoken.body, output.logprobs or (), output.prompt_logprobs)
        elif output.logprobs:
            logprobs = spoken.body(output.logprobs)
        choice = self._choice(index, echo + output.text, output.finish_reason, logprobs)
        return event({**self._head(), "choices": [choice], **({"usage": None} if self._with_usage else {})})

    @property
    def _with_usage(self) -> bool:
        return bool(self.wanted.stream_options and self.wanted.stream_options.include_usage)

    def _head(self) -> dict[str, Any]:
        model = self.service.model_name
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": model}

    def _last(self, usages: Sequence[Usage], timings: Timings | None) -> dict[str, Any]:
        usage = usage_body([self._total(usages)])
        return {"usage": usage, "timings": timings_body(timings, self.started)}

    async def _whole_choice(self, index: int, answers: Sequence[Answer]) -> dict[str, Any]:
        answer, prompt = answers[index], answers[index - index % self.n].prompt_logprobs
        logprobs = None
        if self.wanted.logprobs is not None:
            echoed = prompt if self.wanted.echo else None
            logprobs = await asyncio.to_thread(LegacyLogprobs().body, answer.logprobs, echoed)
        choice = self._choice(index, self._echo(index) + answer.text, answer.finish_reason, logprobs)
        if self.wanted.prompt_logprobs is not None:
            choice["prompt_logprobs"] = await prompt_logprobs_body(prompt)
        return choice

    @staticmethod
    def _choice(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _chats(self) -> list[ChatInput]:
        return [
            self._chat(prompt, p * self.n + i, i)
            for p, prompt in enumerate(self.prompts)
            for i in range(self.n)
        ]

    def _chat(self, prompt: Prompt, index: int, number: int) -> ChatInput:
        return ChatInput(
            request_id=f"{self.id}-{index}",
            messages=(),
            prompt=prompt,
            sampling=self._sampling(number),
            stop=self.wanted.stop_texts(),
            owner=self.owner,
            priority=self.wanted.priority or 0,
            deadline=deadline(self.started, self.wanted.deadline_ms),
            cache_salt=self.wanted.cache_salt,
        )

    def _sampling(self, number: int) -> SamplingParams:
        """Of the answers to one prompt the first tells of it, for all; in a stream each for itself."""
        sampling = reseeded(self.sampling, number)
        return sampling if number == 0 or self.wanted.stream else replace(sampling, prompt_logprobs=None)

    def _echo(self, index: int) -> str:
        if not self.wanted.echo:
            return ""
        prompt = self.prompts[index // self.n]
        return prompt if isinstance(prompt, str) else self.service.detokenize(list(prompt))

    def _total(self, usages: Sequence[Usage]) -> Usage:
        """Each prompt once, each answer."""
        firsts = usages[:: self.n]
        return Usage(
            prompt_tokens=sum(u.prompt_tokens for u in firsts),
            completion_tokens=sum(u.completion_tokens for u in usages),
            cached_tokens=sum(u.cached_tokens for u in firsts),
        )


class LegacyLogprobs:
    """Writes log-probabilities in this endpoint's shape. ``text_offset`` counts characters of the answer, or
    from the beginning of the prompt where that is echoed."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, logprobs: Sequence[TextLogprob], prompt: PromptLogprobs | None = None) -> dict[str, Any]:
        """Of the tokens of ``prompt``, if it is given, and of those of the answer."""
        entries = [*(_echoed(prompt) if prompt else ()), *logprobs]
        return {
            "tokens": [_shown(entry.token) for entry in entries],
            "token_logprobs": [_least(entry.logprob) for entry in entries],
            "top_logprobs": [_top(entry) for entry in entries],
            "text_offset": [self._place(entry.token) for entry in entries],
        }

    def _place(self, token: bytes) -> int:
        place = self._offset
        self._offset += len(self._utf8.decode(token))
        return place


def _echoed(prompt: PromptLogprobs) -> Iterator[TextLogprob]:
    """The tokens of a prompt as those of an answer; nothing stands before the first, so it has no number."""
    first = int(prompt.token_ids[0])
    for row in prompt.rows():
        if row is None:
            yield TextLogprob(prompt.texts[first], math.nan)
        else:
            yield TextLogprob(row.token, row.logprob, tuple((text, value) for _, text, value in row.top))


def _least(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


def _top(entry: TextLogprob) -> dict[str, float] | None:
    """The alternatives, and what was chosen if it is none of them."""
    if not entry.top:
        return None
    told = (*entry.top, (entry.token, entry.logprob))
    return {_shown(token): max(value, LEAST_LOGPROB) for token, value in told}


def _shown(token: bytes) -> str:
    """A token's text; the bytes of one that is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(_is_id, value)):
        return tuple(value)
    raise InvalidRequest(f"{where} must be a text or a list of token ids, and not empty", param=where)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_ID


@contextmanager
def _naming_the_prompt() -> Iterator[None]:
    """What is wrong with the messages elsewhere is wrong with the prompt here."""
    try:
        yield
    except MMServeError as error:
        error.param = "prompt" if error.param == "messages" else error.param
        raise
