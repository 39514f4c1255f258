"""Chats in, text out: preprocessing, engine and detokenizer behind one asynchronous call."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from mmserve.answering import AnswerEngine, LocalEngine
from mmserve.core.arena import Arena
from mmserve.core.config import Config
from mmserve.core.env import prepare_environment
from mmserve.core.messages import ChatInput, ImagePart, Seen, TextOutput, VideoPart
from mmserve.core.metrics import Metrics, RequestWatch
from mmserve.core.thinking import Start
from mmserve.live.desk import LiveDesk
from mmserve.preprocess.cache import EarlyAnswers
from mmserve.preprocess.desk import PrepareDesk
from mmserve.preprocess.library import MediaLibrary

if TYPE_CHECKING:
    from mmserve.preprocess.processor import Processor
    from mmserve.preprocess.prompt import Prepared
    from mmserve.preprocess.spec import ProcessorSpec
    from mmserve.preprocess.workers import Workers

log = logging.getLogger(__name__)

MakeEngine = Callable[[Config, "ProcessorSpec", "Workers"], AnswerEngine]


class Service:
    """A loaded model that answers chats. Make it with ``load``; ``close`` it when done.

    It may be called from any event loop, also from several.
    """

    def __init__(
        self, config: Config, processor: "Processor", workers: "Workers", engine: AnswerEngine
    ) -> None:
        self.config = config
        self.model_name = config.model.served_model_name or _own_name(config.model.model)
        self.processor = processor
        self.spec: ProcessorSpec = processor.spec
        self.metrics = Metrics(self.stats)
        self._desk = _desk(config, workers, engine, self.metrics)
        self._engine = engine
        self.live = LiveDesk(config, processor.writer, self._desk, engine, self.metrics)
        self.library = MediaLibrary(config.media.media_store_mib << 20, config.media.media_store_s)

    @classmethod
    def load(cls, config: Config) -> "Service":
        """Load the model into this process and start its engine; the workers start meanwhile.

        ModelLoadError, ConfigError or WorkersDead say what is wrong.
        """
        return cls._begin(config, _local)

    @classmethod
    def start(cls, config: Config) -> "Service":
        """The same, but engine and detokenizer are processes of their own, and torch is not loaded here."""
        return cls._begin(config, _remote)

    @classmethod
    def _begin(cls, config: Config, make_engine: MakeEngine) -> "Service":
        prepare_environment()
        from mmserve.models.hub import resolve
        from mmserve.preprocess.processor import Processor
        from mmserve.preprocess.spec import ProcessorSpec
        from mmserve.preprocess.workers import make_workers

        options = config.model
        spec = ProcessorSpec.load(
            resolve(options.model, options.revision, weights=options.load_format != "dummy")
        )
        workers = make_workers(spec, config)
        try:
            processor = Processor(spec, config.media)
            return cls(config, processor, workers, make_engine(config, spec, workers))
        except BaseException:
            _run_apart(workers.close())
            raise

    @property
    def ready(self) -> bool:
        """Whether the engine runs and the workers answer."""
        return self.trouble is None

    @property
    def trouble(self) -> str | None:
        """What it lacks to be ready, in words."""
        if trouble := self._engine.trouble:
            return trouble
        return None if self._desk.workers.ready else "the workers that prepare media and text are not running"

    @property
    def lives(self) -> int:
        """How many times the engine has been started."""
        return self._engine.lives

    @property
    def failed(self) -> Future[str]:
        """Done with the reason when the engine has died for good and the server is to end."""
        return self._engine.failed

    def stats(self) -> dict[str, Any]:
        """Counts and gauges of the engine (see ``Engine.stats``), of preprocessing, of live sessions and of
        what callers have stored. Each number has its line in ``core.figures.FIGURES``."""
        engine = self._engine.stats()
        expired = engine.get("expired", 0) + self._desk.expired
        return {
            **engine,
            **self._desk.stats(),
            **self.library.stats(),
            **self.live.stats(),
            "expired": expired,
        }

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
        digests = [item.digest for item in prepared.request.items]
        sight = Sight.of(prepared)
        pixels = partial(self._desk.pixels, chat, prepared.digests)
        answer = self._engine.answer(prepared.request, pixels)
        async with aclosing(answer) as said:
            del prepared, answer  # the engine alone keeps the pixels, for as long as it needs them
            async for part in said:
                if part.tokens:
                    watch.tokens(part.timings)
                    self._desk.encoded(digests)
                    digests.clear()
                if part.piece is not None:
                    piece = sight.complete(part.piece)
                    watch.said(piece)
                    yield piece

    def close(self) -> None:
        """Abort what still runs, free the threads and end the workers."""
        self._engine.stop()
        _run_apart(self._desk.close())


def _desk(config: Config, workers: "Workers", engine: AnswerEngine, metrics: Metrics) -> PrepareDesk:
    cache = config.cache
    pixels_mib = min(cache.pixel_cache_mib, config.media.arena_mib // 4)  # or nobody else could enter it
    answers = EarlyAnswers(cache.early_answers_mib << 20, pixels_mib << 20)
    limits = {"max_items": config.media.max_items, "max_text_chars": config.media.max_text_chars}
    return PrepareDesk(workers, answers, engine.holds, metrics, **limits)


def _local(config: Config, spec: "ProcessorSpec", workers: "Workers") -> AnswerEngine:
    from mmserve.engine.detokenizer import TokenBytes
    from mmserve.engine.loop import EngineThread
    from mmserve.loading import load_engine, told_of

    engine = load_engine(config, spec.eos_ids, spec.tokenizer_json)
    workers.wait_ready()
    if workers.arena is not None:
        engine.device.pin(*workers.arena.window.warm)
    for line in told_of(engine):
        log.info(line)
    return LocalEngine(EngineThread(engine), TokenBytes.from_json(spec.tokenizer_json))


def _remote(config: Config, spec: "ProcessorSpec", workers: "Workers") -> AnswerEngine:
    from mmserve.processes.remote import RemoteEngine

    engine = RemoteEngine(config, spec, workers.arena or Arena(config.media.arena_mib << 20))
    try:
        workers.wait_ready()
        engine.wait_ready()
    except BaseException:
        engine.stop()
        raise
    return engine


def _run_apart(closing: Coroutine[Any, Any, None]) -> None:
    """Wait for ``closing`` on a thread of its own, since the caller may stand in an event loop."""
    thread = threading.Thread(target=asyncio.run, args=(closing,))
    thread.start()
    thread.join()


class Sight(NamedTuple):
    """What was seen of a request's media, and where its answer begins; the same in every piece."""

    media: tuple[Seen, ...]
    start: Start
    image_tokens: int
    video_tokens: int

    @classmethod
    def of(cls, prepared: "Prepared") -> "Sight":
        return cls(prepared.seen, prepared.start, prepared.image_tokens, prepared.video_tokens)

    def complete(self, piece: TextOutput) -> TextOutput:
        usage = structs.replace(piece.usage, image_tokens=self.image_tokens, video_tokens=self.video_tokens)
        return structs.replace(piece, usage=usage, media=self.media, start=self.start)


def _own_name(model: str) -> str:
    """A hub name as it is, a folder by its last part."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
