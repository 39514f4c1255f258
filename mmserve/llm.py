"""The offline API: a model in this process, answers by plain function calls.

from mmserve import LLM, SamplingParams

llm = LLM("mmserve/tiny-vl")
[answer] = llm.chat([{"role": "user", "content": [
    {"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "What is this?"}]}])
print(answer.text)
"""

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mmserve.advice import advised
from mmserve.chat_format import Loaded, MediaRef, media_refs, parse_messages
from mmserve.core.config import BUNDLED_MODEL, Config
from mmserve.core.errors import EngineDead, InvalidRequest, MediaError
from mmserve.core.messages import (
    ChatInput,
    FinishReason,
    Message,
    PromptLogprob,
    SamplingParams,
    TextLogprob,
    TextOutput,
    Timings,
    Usage,
)
from mmserve.generation import speaking
from mmserve.service import Service

T = TypeVar("T")
Conversation = Sequence[Mapping[str, Any]]
Sampling = SamplingParams | Sequence[SamplingParams] | None

_URLS = ("http://", "https://", "data:", "file://")


@dataclass
class Completion:
    """One finished answer. ``logprobs`` and ``prompt_logprobs`` are None unless the sampling asked for them;
    the latter have an entry for each token of the prompt, None for the first."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    logprobs: list[TextLogprob] | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    timings: Timings | None = None

    def add(self, output: TextOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.finish_reason, self.usage, self.timings = output.finish_reason, output.usage, output.timings
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = list(output.prompt_logprobs.rows())


class LLM:
    """A model, loaded once. All prompts of one call run through the engine together.

    ``options`` are those of the configuration tree by name, e.g. ``dtype="float32"``,
    ``kv_cache_mib=2048``, ``threads=4``. Usable as a context manager; ``close`` frees the model.
    """

    def __init__(self, model: str | Path = BUNDLED_MODEL, **options: Any) -> None:
        self.config = Config.of(model=str(model), **options).for_whole_answers()
        self.service = Service.load(self.config)
        scheduler, most = self.config.scheduler, self.config.media.max_preparing
        self._at_once = min(2 * scheduler.max_running, scheduler.max_waiting, most, 128)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Sampling = None,
        *,
        stop: str | Sequence[str] = (),
        **template_kwargs: Any,
    ) -> list[Completion]:
        """Answer one conversation or several, in order.

        Messages have the OpenAI shape; see ``chat_format.parse_messages`` for the kinds of pictures and
        clips. Without ``sampling`` the model's own defaults hold. ``template_kwargs`` go to the chat
        template. MMServeError of the first conversation that fails.
        """
        conversations: Sequence[Any] = [messages] if _is_conversation(messages) else messages
        params = self._sampling(sampling, len(conversations))
        pairs = zip(conversations, params, strict=True)
        return self._run(
            self._all([partial(self._chat, c, p, _stops(stop), template_kwargs) for c, p in pairs])
        )

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> list[Completion]:
        """Continue raw prompts, in order; no chat template is applied.

        A prompt is a string, or ``{"prompt": "...", "media": [...]}`` whose placeholders
        (``<|vision_start|><|image_pad|><|vision_end|>``) take the media in order. Each medium is a content
        part as in ``chat``, or a picture: path, URL, bytes, PIL or array.
        """
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._sampling(sampling, len(several))
        pairs = zip(several, params, strict=True)
        return self._run(self._all([partial(self._raw, p, s, _stops(stop)) for p, s in pairs]))

    def close(self) -> None:
        """Free the model and the threads; calls that are under way end with an error. Twice is once."""
        if self._loop.is_closed():
            return
        self.service.close()
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ one answer

    async def _chat(
        self,
        messages: Conversation,
        sampling: SamplingParams,
        stop: tuple[str, ...],
        template_kwargs: dict[str, Any],
    ) -> Completion:
        chat = ChatInput(
            request_id=_new_id(),
            messages=await self._parse(messages),
            sampling=sampling,
            stop=stop,
            template_kwargs=template_kwargs,
        )
        return await _collect(speaking(self.service, chat))

    async def _raw(
        self, prompt: str | Mapping[str, Any], sampling: SamplingParams, stop: tuple[str, ...]
    ) -> Completion:
        text, media = _prompt_fields(prompt)
        parts: tuple[Any, ...] = ()
        if media:
            parts = (await self._parse([{"role": "user", "content": media}]))[0].content
        chat = ChatInput(
            request_id=_new_id(),
            messages=(Message("user", parts),),
            prompt=text,
            sampling=sampling,
            stop=stop,
        )
        return await _collect(speaking(self.service, chat))

    async def _parse(self, messages: Conversation) -> tuple[Message, ...]:
        refs = media_refs(messages)
        blobs = await asyncio.gather(*map(self._read, refs))
        return parse_messages(messages, dict(zip(refs, blobs, strict=True)).__getitem__)

    async def _read(self, ref: MediaRef) -> Loaded:
        """The caller is the user of this machine: beside URLs, any path may be read."""
        from mmserve.media import fetch_media

        if ref.source is None or ref.source.startswith(_URLS):
            return await fetch_media(ref, self.config.media)
        try:
            return Loaded(await asyncio.to_thread(Path(ref.source).expanduser().read_bytes))
        except OSError as error:
            raise MediaError(f"cannot read {ref.source}: {error.strerror}", param=ref.param) from None

    # ------------------------------------------------------------ many answers

    async def _all(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, Completion]]]) -> list[Completion]:
        """Run ``jobs``, a bounded number at once; the first error ends the others."""
        gate = asyncio.Semaphore(self._at_once)

        async def one(job: Callable[[], Coroutine[Any, Any, Completion]]) -> Completion:
            async with gate:
                return await job()

        tasks = [asyncio.create_task(one(job)) for job in jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the loop's own thread, so that it also works where a loop runs already (notebooks)."""
        if self._loop.is_closed():
            work.close()
            raise EngineDead("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _sampling(self, sampling: Sampling, count: int) -> list[SamplingParams]:
        if sampling is None:
            sampling = advised(self.service.spec.sampling)
        params = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
        if not all(isinstance(p, SamplingParams) for p in params):
            raise InvalidRequest(
                "sampling must be SamplingParams, or a list with one a prompt", param="sampling"
            )
        if len(params) != count:
            raise InvalidRequest(
                f"there are {count} prompts but {len(params)} sampling parameters", param="sampling"
            )
        return params


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(outputs: AsyncGenerator[TextOutput, None]) -> Completion:
    completion = Completion()
    async with aclosing(outputs) as pieces:
        async for output in pieces:
            completion.add(output)
    return completion


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several; anything else is an InvalidRequest."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stops):
        raise InvalidRequest("stop must be a string or a list of strings, none of them empty", param="stop")
    return stops


def _is_conversation(messages: Any) -> bool:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list of messages or of conversations", param="messages")
    return isinstance(messages[0], Mapping)


def _prompt_fields(prompt: str | Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The text of a prompt, and its media as content parts."""
    if isinstance(prompt, str):
        return prompt, []
    unknown = set(prompt) - {"prompt", "media"}
    if unknown or not isinstance(prompt.get("prompt"), str):
        raise InvalidRequest("a prompt must be a string or {'prompt': str, 'media': [...]}", param="prompts")
    media = prompt.get("media") or []
    return prompt["prompt"], [m if isinstance(m, Mapping) else {"type": "image", "image": m} for m in media]


def _new_id() -> str:
    return f"llm-{uuid.uuid4().hex}"
