"""From chat inputs to outputs: several at once, interleaved, and gathered into whole answers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct

from mmserve.core.errors import (
    DeadlineExceeded,
    InvalidGrammar,
    MMServeError,
    NoTokenAllowed,
    OutOfMemory,
)
from mmserve.core.messages import (
    ChatInput,
    Grammar,
    ImagePart,
    PromptLogprobs,
    Seen,
    TextLogprob,
    TextOutput,
    Timings,
    Usage,
    VideoPart,
)
from mmserve.core.metrics import Metrics
from mmserve.preprocess.library import MediaLibrary

if TYPE_CHECKING:
    from mmserve.live.desk import LiveDesk


class Generator(Protocol):
    """What endpoints and commands ask of ``mmserve.service.Service``."""

    model_name: str
    spec: Any
    library: MediaLibrary
    metrics: Metrics
    live: "LiveDesk"

    @property
    def ready(self) -> bool: ...
    @property
    def trouble(self) -> str | None: ...
    @property
    def lives(self) -> int: ...
    def generate(self, chat: ChatInput) -> AsyncGenerator[TextOutput, None]: ...
    async def look(self, part: ImagePart | VideoPart) -> Seen: ...


Numbered = tuple[int, TextOutput]
Piece = TypeVar("Piece")


async def speaking(service: Generator, chat: ChatInput) -> AsyncGenerator[TextOutput, None]:
    """The answer to ``chat`` in pieces; MMServeError where it fails. Closing it aborts it."""
    async with aclosing(service.generate(chat)) as outputs:
        async for output in outputs:
            yield checked(output, chat.sampling.grammar)


def generate(service: Generator, chats: Sequence[ChatInput]) -> AsyncGenerator[Numbered, None]:
    """(index, output) of all ``chats`` as they come. Closing it aborts those that still run."""
    return merged([speaking(service, chat) for chat in chats])


async def merged(
    sources: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[tuple[int, Piece], None]:
    """(index, piece) of all ``sources`` as they come; closing it closes them all."""
    if len(sources) > 1:
        async with aclosing(_interleaved(sources)) as numbered:
            async for index, piece in numbered:
                yield index, piece
        return
    async with aclosing(sources[0]) as pieces:
        async for piece in pieces:
            yield 0, piece


async def _interleaved(
    sources: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[tuple[int, Piece], None]:
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    running = len(pumps)
    try:
        while running:
            index, piece = await queue.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                running -= 1
            else:
                yield index, piece
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, source: AsyncGenerator[Any, None], queue: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(source) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))
        queue.put_nowait((index, None))
    except Exception as error:
        queue.put_nowait((index, error))


def checked(output: TextOutput, form: Grammar | None = None) -> TextOutput:
    """``output``, unless it ends its request otherwise than it should: then that is raised. ``form`` is the
    one that the answer was to have."""
    if output.finish_reason in ("error", "abort"):
        raise _failure(output, form)
    return output


def _failure(output: TextOutput, form: Grammar | None) -> MMServeError:
    """What the engine ended a request with, as an error of its kind."""
    match output.error_code:
        case DeadlineExceeded.code:
            return DeadlineExceeded(output.error or "its deadline passed", param="deadline_ms")
        case OutOfMemory.code:
            return OutOfMemory(output.error or OutOfMemory.said)
        case NoTokenAllowed.code:
            return NoTokenAllowed(output.error or NoTokenAllowed.said)
        case InvalidGrammar.code:
            param = None if form is None else form.param
            return InvalidGrammar(output.error or "it cannot be kept to", param=param)
    if output.finish_reason == "abort":
        return MMServeError(output.error or "the request was aborted", code="aborted")
    return MMServeError(output.error or "the engine failed on this request", code="generation_failed")


class Answer(Struct):
    """One finished generation."""

    text: str = ""
    logprobs: list[TextLogprob] = []
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    timings: Timings | None = None
    media: tuple[Seen, ...] = ()

    def add(self, output: TextOutput) -> None:
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.usage = output.usage
        self.timings = output.timings or self.timings
        self.media = output.media or self.media


async def collect(outputs: AsyncGenerator[Numbered, None], count: int) -> list[Answer]:
    """Whole answers, one for each of ``count`` generations."""
    answers = [Answer() for _ in range(count)]
    texts: list[list[str]] = [[] for _ in range(count)]
    async with aclosing(outputs) as numbered:
        async for index, output in numbered:
            texts[index].append(output.text)
            answers[index].add(output)
    for answer, parts in zip(answers, texts, strict=True):
        answer.text = "".join(parts)
    return answers


async def whole(service: Generator, chat: ChatInput) -> Answer:
    """The finished answer to one chat."""
    return (await collect(generate(service, [chat]), 1))[0]
