"""A service without a model: it answers by rules, and counts what still runs."""

import asyncio
import io
import time
from concurrent.futures import Future
from types import SimpleNamespace

from helpers.cameras import FakeLive
from PIL import Image, UnidentifiedImageError

from mmserve.core.errors import ContextLengthExceeded, MediaError
from mmserve.core.messages import (
    ImagePart,
    Seen,
    TextLogprob,
    TextOutput,
    TextPart,
    Timings,
    Usage,
    VideoPart,
)
from mmserve.core.metrics import Metrics
from mmserve.core.thinking import Start
from mmserve.engine.limits import check_sampling
from mmserve.preprocess.library import MediaLibrary

ANSWER = ["A ", "red ", "circle ", "on ", "blue ", "— 🎨."]
STEP_S = 0.005
VOCABULARY = 1000


class FakeService:
    """``generate`` checks pictures for real, then says ANSWER (or what ``scripts`` has for the question).

    ``start`` is where its answers begin.
    """

    def __init__(self, model_name="mmserve/tiny-vl", template=None):
        self.model_name = model_name
        self.spec = SimpleNamespace(sampling={"temperature": 0.7, "top_k": 20}, chat_template=template)
        self.scripts, self.start = {}, Start.OUTSIDE
        self.ready, self.lives, self.failed = True, 1, Future()
        self.running = 0
        self.seen = []
        self.most_running = 0
        self.metrics = Metrics(self.stats)
        self.library = MediaLibrary(1 << 20, 3600)
        self.live = FakeLive()
        self.looked = 0

    @property
    def trouble(self):
        return None if self.ready else "nobody is at home"

    def stats(self):
        return {"running": self.running}

    def close(self):
        self.ready = False

    async def look(self, part):
        self.looked += 1
        return _seen(part)

    async def generate(self, chat):
        self.seen.append(chat)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            arrived = time.monotonic()
            question = _prepared(chat)
            check_sampling(chat.sampling, VOCABULARY)
            first = None
            words = self.scripts.get(question) or _words(question)
            limit = chat.sampling.max_tokens or len(words)
            for number, word in enumerate(words[:limit], 1):
                await asyncio.sleep(STEP_S)
                first = first or time.monotonic()
                if question == "break" and number == 3:
                    raise RuntimeError("a fault in the engine")
                if question == "fail" and number == 3:
                    yield TextOutput(request_id=chat.request_id, text="", finish_reason="error", error="lost")
                    return
                end = (
                    ("stop" if number == len(words) else "length") if number in (limit, len(words)) else None
                )
                yield TextOutput(
                    request_id=chat.request_id,
                    text=word,
                    logprobs=_logprobs(word, chat.sampling.logprobs),
                    finish_reason=end,
                    usage=_usage(chat, number),
                    timings=Timings(arrived, arrived, arrived, first, time.monotonic() if end else None),
                    media=tuple(map(_seen, _media(chat))),
                    start=self.start,
                )
        finally:
            self.running -= 1


def _words(question):
    if question in ("long", "fail", "break"):
        return ["word "] * 10_000
    return ANSWER


def _prepared(chat):
    """The question's text; pictures that cannot be read are errors, as in the real service."""
    parts = [part for message in chat.messages for part in message.content]
    for part in _media(chat):
        _seen(part)
    question = " ".join(part.text for part in parts if isinstance(part, TextPart))
    if len(question) > 5000:
        raise ContextLengthExceeded("the prompt has 6000 tokens; at most 2048 fit", param="messages")
    return question


def _media(chat):
    return [p for m in chat.messages for p in m.content if isinstance(p, ImagePart | VideoPart)]


def _seen(part):
    if isinstance(part, VideoPart):
        warnings = ("the tail is missing",) if part.data == b"cut" else ()
        return Seen("video", "fake", (48, 64), (32, 32), (2, 2), 8, timestamps=(0.0, 0.5), warnings=warnings)
    if part.data is None:
        return Seen("image", "RGB", part.pixels.shape[:2], (32, 32), (4, 4), 4)
    try:
        with Image.open(io.BytesIO(part.data)) as image:
            image.load()
            return Seen("image", image.format, image.size[::-1], (32, 32), (4, 4), 4)
    except (UnidentifiedImageError, OSError):
        raise MediaError("not a picture that can be read", param=part.param) from None


def _logprobs(word, count):
    if count is None:
        return None
    top = tuple((f"alt{i}".encode(), -1.0 - i) for i in range(count))
    return (TextLogprob(word.encode(), -0.25, top),)


def _usage(chat, completion):
    seen = [_seen(part) for part in _media(chat)]
    images = sum(s.tokens for s in seen if s.kind == "image")
    videos = sum(s.tokens for s in seen if s.kind == "video")
    return Usage(10 + images + videos, completion, 3, images, videos)
