"""Chats in, text out: preprocessing, engine and detokenizer behind one asynchronous call."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from mmserve.core.config import Config
from mmserve.core.env import prepare_environment
from mmserve.core.errors import MMServeError
from mmserve.core.messages import (
    ChatInput,
    FinishReason,
    ImagePart,
    PixelsWanted,
    PreparedRequest,
    Seen,
    TextLogprob,
    TextOutput,
    TokenLogprob,
    TokenOutput,
    Usage,
    VideoPart,
)
from mmserve.core.metrics import Metrics, RequestWatch
from mmserve.core.thinking import ThoughtCount
from mmserve.engine.detokenizer import Detokenizer, TokenBytes
from mmserve.engine.grammar.desk import GrammarDesk
from mmserve.engine.loop import Delivery, EngineThread
from mmserve.preprocess.cache import EarlyAnswers
from mmserve.preprocess.desk import PrepareDesk
from mmserve.preprocess.library import MediaLibrary

if TYPE_CHECKING:
    from mmserve.engine.grammar.base import GrammarBackend
    from mmserve.preprocess.processor import Processor
    from mmserve.preprocess.prompt import Prepared
    from mmserve.preprocess.spec import ProcessorSpec
    from mmserve.preprocess.workers import Workers

log = logging.getLogger(__name__)


class Service:
    """A loaded model that answers chats. Make it with ``load``; ``close`` it when done.

    It may be called from any event loop, also from several.
    """

    def __init__(
        self, config: Config, processor: "Processor", workers: "Workers", engine: EngineThread
    ) -> None:
        self.config = config
        self.model_name = config.model.served_model_name or _own_name(config.model.model)
        self.processor = processor
        self.spec: ProcessorSpec = processor.spec
        self.metrics = Metrics(self.stats)
        self._desk = _desk(config, workers, engine, self.metrics)
        self._engine = engine
        self._tokens = TokenBytes.from_json(processor.spec.tokenizer_json)
        self.library = MediaLibrary(config.media.media_store_mib << 20, config.media.media_store_s)

    @classmethod
    def load(cls, config: Config) -> "Service":
        """Load the model and start its engine; the workers start meanwhile.

        ModelLoadError, ConfigError or WorkersDead say what is wrong.
        """
        prepare_environment()
        from mmserve.models.hub import resolve
        from mmserve.preprocess.spec import ProcessorSpec
        from mmserve.preprocess.workers import make_workers

        options = config.model
        spec = ProcessorSpec.load(
            resolve(options.model, options.revision, weights=options.load_format != "dummy")
        )
        workers = make_workers(spec, config)
        try:
            return cls._load(config, spec, workers)
        except BaseException:
            _run_apart(workers.close())
            raise

    @classmethod
    def _load(cls, config: Config, spec: "ProcessorSpec", workers: "Workers") -> "Service":
        import torch

        from mmserve.engine.engine import Engine
        from mmserve.models.registry import load_model
        from mmserve.preprocess.processor import Processor

        if config.runner.threads:
            torch.set_num_threads(config.runner.threads)
        processor = Processor(spec, config.media)
        model = load_model(config.model, linear_backend=config.runner.linear_backend)
        engine = Engine(model, config, spec.eos_ids, _grammars(spec, model.config.text.vocab_size))
        workers.wait_ready()
        log.info("a prompt and its answer may have %d tokens", engine.max_model_len)
        log.info("backends: %s", ", ".join(f"{op} {form}" for op, form in model.backends.items()))
        return cls(config, processor, workers, EngineThread(engine))

    @property
    def ready(self) -> bool:
        """Whether the engine runs and the workers answer."""
        return self._engine.alive and self._desk.workers.ready

    def stats(self) -> dict[str, Any]:
        """Counts and gauges of the engine (see ``Engine.stats``), of preprocessing and of what callers have
        stored. Each number has its line in ``core.figures.FIGURES``."""
        return {**self._engine.stats(), **self._desk.stats(), **self.library.stats()}

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, in which reserved tokens count."""
        return self.processor.tokenize(text)

    def detokenize(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, special tokens included."""
        return self.processor.decode(token_ids, skip_special_tokens=False)

    async def generate(self, chat: ChatInput) -> AsyncGenerator[TextOutput, None]:
        """The answer to ``chat`` in pieces; the last one alone has a ``finish_reason``.

        MMServeError when the request is refused or the engine dies. Closing or cancelling it frees all
        that the request held within a step.
        """
        with self.metrics.request() as watch:
            async with aclosing(self._answer(chat, await self._desk.prepare(chat), watch)) as outputs:
                async for output in outputs:
                    yield output

    async def look(self, part: ImagePart | VideoPart) -> Seen:
        """What the model would see of ``part``; MediaError if it cannot be seen."""
        return (await self._desk.look(part)).seen

    async def _answer(
        self, chat: ChatInput, prepared: "Prepared", watch: RequestWatch
    ) -> AsyncGenerator[TextOutput, None]:
        answer = Answer(_without_items(prepared), self._tokens)
        digests = [item.digest for item in prepared.request.items]
        async with aclosing(self._outputs(chat, prepared.request)) as outputs:
            del prepared  # the engine alone keeps the pixels, for as long as it needs them
            async for output in outputs:
                if output.token_ids:
                    watch.tokens(output.timings)
                    self._desk.encoded(digests)
                    digests.clear()
                piece = answer.add(output)
                if answer.ended_early:
                    await outputs.aclose()
                if piece is not None:
                    watch.said(piece)
                    yield piece

    async def _outputs(self, chat: ChatInput, request: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
        """What the engine says to ``request``, which is aborted when this is closed before the end."""
        inbox, ended = Inbox(), False
        self._engine.submit(request, inbox.deliver)
        del request
        try:
            while not ended:
                delivery = await inbox.next()
                if isinstance(delivery, PixelsWanted):
                    self._engine.supply(chat.request_id, await self._desk.pixels(chat), inbox.deliver)
                else:
                    ended = delivery.finish_reason is not None
                    yield delivery
        finally:
            if not ended:
                self._engine.abort(chat.request_id, inbox.deliver)

    def close(self) -> None:
        """Abort what still runs, free the threads and end the workers."""
        self._engine.stop()
        _run_apart(self._desk.close())


class Inbox:
    """Carries deliveries from the engine's thread to the coroutine that waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self.deliver = self._deliver  # one object, by which the engine knows its submission

    async def next(self) -> TokenOutput | PixelsWanted:
        """The next delivery; raises what was delivered in its place."""
        delivery = await self._deliveries.get()
        if isinstance(delivery, MMServeError):
            raise delivery
        return delivery

    def _deliver(self, delivery: Delivery) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliveries.put_nowait, delivery)


class Answer:
    """One answer in the making: tokens in, text out, and the count of both."""

    def __init__(self, prepared: "Prepared", tokens: TokenBytes) -> None:
        request = prepared.request
        self.request_id = request.request_id
        self.finish_reason: FinishReason | None = None
        self.ended_early = False  # by a stop string, of which the engine does not know
        self._prepared = prepared
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens, request.stop, request.sampling.min_tokens)
        self._thoughts = ThoughtCount(request.thinking)
        self._completion = 0
        self._ids: list[int] = []  # taken since the last piece of text
        self._logprobs: list[TextLogprob] = []

    def add(self, output: TokenOutput) -> TextOutput | None:
        """The next piece of text, or None while there is nothing to show."""
        text = "".join(self._take(output))
        self.ended_early = self._detokenizer.stopped and output.finish_reason is None
        self.finish_reason = "stop" if self._detokenizer.stopped else output.finish_reason
        if self.finish_reason:
            text += self._detokenizer.flush()
        elif not text:
            return None
        return self._piece(text, output)

    def _take(self, output: TokenOutput) -> list[str]:
        """The text of each token; that of a stop token is not part of the answer."""
        self._completion += len(output.token_ids)
        self._ids += output.token_ids
        self._logprobs += [self._shown(logprob) for logprob in output.logprobs or ()]
        spoken = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        for token in spoken:
            self._thoughts.add(token)
        return [self._detokenizer.add(token) for token in spoken]

    def _piece(self, text: str, output: TokenOutput) -> TextOutput:
        ids, self._ids = tuple(self._ids), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextOutput(
            request_id=self.request_id,
            text=text,
            token_ids=ids,
            logprobs=None if self._prepared.request.sampling.logprobs is None else logprobs,
            finish_reason=self.finish_reason,
            error=output.error,
            usage=self._usage(output),
            timings=output.timings.ended() if self.ended_early and output.timings else output.timings,
            media=self._prepared.seen,
            start=self._prepared.start,
        )

    def _usage(self, output: TokenOutput) -> Usage:
        return Usage(
            prompt_tokens=output.prompt_tokens,
            completion_tokens=self._completion,
            cached_tokens=output.cached_tokens,
            image_tokens=self._prepared.image_tokens,
            video_tokens=self._prepared.video_tokens,
            reasoning_tokens=self._thoughts.tokens,
        )

    def _shown(self, logprob: TokenLogprob) -> TextLogprob:
        top = tuple((self._tokens.raw(token), value) for token, value in logprob.top)
        return TextLogprob(self._tokens.raw(logprob.token_id), logprob.logprob, top)


def _desk(config: Config, workers: "Workers", engine: EngineThread, metrics: Metrics) -> PrepareDesk:
    cache = config.cache
    pixels_mib = min(cache.pixel_cache_mib, config.media.arena_mib // 4)  # or nobody else could enter it
    answers = EarlyAnswers(cache.early_answers_mib << 20, pixels_mib << 20)
    limits = {"max_items": config.media.max_items, "max_text_chars": config.media.max_text_chars}
    return PrepareDesk(workers, answers, engine.holds, metrics, **limits)


def _grammars(spec: "ProcessorSpec", vocab: int) -> GrammarDesk:
    def make() -> "GrammarBackend":
        from mmserve.engine.grammar.guidance import GuidanceBackend

        return GuidanceBackend(spec.tokenizer_json, vocab, spec.eos_ids)

    return GrammarDesk(make)


def _run_apart(closing: Coroutine[Any, Any, None]) -> None:
    """Wait for ``closing`` on a thread of its own, since the caller may stand in an event loop."""
    thread = threading.Thread(target=asyncio.run, args=(closing,))
    thread.start()
    thread.join()


def _without_items(prepared: "Prepared") -> "Prepared":
    return replace(prepared, request=structs.replace(prepared.request, items=()))


def _own_name(model: str) -> str:
    """A hub name as it is, a folder by its last part."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
