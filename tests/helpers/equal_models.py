"""Models on which equalities are tried, behind one face: random tiny ones, and tiny-vl, which has learnt.

Requests are greedy, and computed in float32, where neighbours in a batch cannot tip a choice.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import numpy as np
from helpers.engine_requests import drain, prepared, tokens
from msgspec.structs import replace

from mmserve.core.config import Config, MediaOptions, ModelOptions
from mmserve.core.digest import framed_digest
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart, VideoPart
from mmserve.engine.engine import Engine
from mmserve.engine.kv.pages import PageAllocator
from mmserve.models.hub import resolve
from mmserve.models.registry import load_model
from mmserve.preprocess.layout import item_keys
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec

SAMPLES = Path(str(files("mmserve.models.tiny") / "samples"))
CASES = [
    (9,),
    (5, ("image", 4, 6), 7),
    (3, ("image", 4, 4), 2, ("image", 4, 4), 3),
    (4, ("video", 3, 4, 8), 6),
    (1, ("video", 2, 2, 4), 1, ("image", 2, 4), 2),
    (30, ("image", 6, 4), 1),
]
CHATS = [
    ("Say something.",),
    ("cat.jpg", "Describe this image."),
    ("apples.jpg", "circle-rabbit.jpg", "What differs?"),
    ("rocket.mp4", "What moves?"),
    ("tea.jpg", "Which word is in the picture?"),
    ("village.jpg", "Describe this image."),
]
TWO_PICTURES = 2  # the index of the prompt with two pictures of one size, in CASES and CHATS


@dataclass
class Said:
    """Tokens, and the log-probabilities of the likeliest at each place, which tell prompts apart whose greedy
    tokens are the same."""

    tokens: list[int]
    logprobs: list[float]
    cached: int = 0

    def __eq__(self, other):
        return self.tokens == other.tokens and np.allclose(self.logprobs, other.logprobs, atol=SAME)

    def unlike(self, other):
        return self.tokens != other.tokens or np.abs(np.subtract(self.logprobs, other.logprobs)).max() > APART

    def cut(self, count):
        return Said(self.tokens[:count], self.logprobs[: count * TOP])


TOP = 3
SAME, APART = 1e-4, 1e-3  # float32 rounds differently where kernels go by a batch's size: by some 1e-6


class EqualModel:
    """``requests``: prompts of every kind. ``model`` runs them, in engines with ``options``."""

    options: ClassVar[dict] = {}

    def engine(self, **options):
        config = Config.of(**{"kv_cache_mib": 8, "threads": 2, **self.options, **options})
        return Engine(self.model, config, eos_ids=())

    def answers(self, requests, **options):
        """What is said to each of ``requests``, all sent at once to a fresh engine."""
        return answered(self.engine(**options), requests)

    def cold(self, request):
        """What is said to it alone, with nothing cached, nothing cut and no step launched ahead."""
        return self.answers([request], prefix_caching=False, step_tokens=2048, overlap="off")[0]


class Random(EqualModel):
    """A pair of ``qwen_pairs``."""

    def __init__(self, pair, **options):
        self.options = options
        self.pair, self.model = pair, pair.model
        prompts = [pair.prompt(*case, seed=number) for number, case in enumerate(CASES)]
        self.requests = [prepared(pair, p, str(i), max_tokens=8, logprobs=TOP) for i, p in enumerate(prompts)]


class TinyVL(EqualModel):
    """The bundled model on the samples that ship with it, all pictures of one size."""

    def __init__(self, **options):
        self.options = options
        self.model = load_model(ModelOptions(dtype="float32"))
        spec = ProcessorSpec.load(resolve("mmserve/tiny-vl"))
        self.processor = Processor(spec, MediaOptions())
        self.requests = [self.request(*chat, name=str(i)) for i, chat in enumerate(CHATS)]

    def request(self, *chat, name="r", max_tokens=12):
        """A conversation of samples by their file names, and at its end the question."""
        *samples, question = chat
        parts = [_part((SAMPLES / sample).read_bytes(), sample) for sample in samples]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=TOP)
        message = Message("user", (*parts, TextPart(question)))
        chat = ChatInput(request_id=name, messages=(message,), sampling=sampling)
        return self.processor.prepare(chat).request


def _part(data, name):
    return VideoPart(data=data) if name.endswith(".mp4") else ImagePart(data=data)


def answered(engine, requests):
    """What is said to each of ``requests``, all submitted to ``engine`` at once; then nothing is held."""
    for request in requests:
        engine.submit(request)
    outputs = drain(engine)
    assert_at_rest(engine)
    return [said(outputs[request.request_id]) for request in requests]


def said(outputs):
    """The outputs of one request, put together."""
    logprobs = [value for output in outputs for logprob in output.logprobs or () for _, value in logprob.top]
    return Said(tokens(outputs), logprobs, outputs[-1].cached_tokens)


def with_pages(engine, count):
    """``engine`` with so few pages."""
    engine.kv.allocator = engine.scheduler.memory.pages = PageAllocator(1 + count)
    return engine


def assert_at_rest(engine):
    """No request is left, every page is free or cached, and no picture is pinned."""
    engine.check_integrity()
    stats, pool = engine.stats(), engine.stage.pool
    assert (stats["running"], stats["waiting"], stats["parked"]) == (0, 0, 0)
    assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages"]
    assert pool.available_bytes == pool.capacity_bytes


def renamed(request, name, **sampling):
    return replace(request, request_id=name, sampling=replace(request.sampling, **sampling))


def with_pixels(request, pixels):
    """``request`` about other stills of the same sizes, ``pixels`` one array an item."""
    items, keys = list(request.items), request.radix_keys.copy()
    for index, array in enumerate(pixels):
        start, stop = items[index].span
        digest = framed_digest(np.ascontiguousarray(array).tobytes(), repr(array.shape))
        items[index] = replace(items[index], pixels=array, digest=digest)
        keys[start:stop] = item_keys(digest, stop - start, index)
    return replace(request, items=tuple(items), radix_keys=keys)


def swapped(request):
    """The same words about the same two pictures in the other order."""
    one, other = request.items
    keys = request.radix_keys.copy()
    for index, (place, shown) in enumerate(((one, other), (other, one))):
        start, stop = place.span
        keys[start:stop] = item_keys(shown.digest, stop - start, index)
    items = (replace(other, span=one.span), replace(one, span=other.span))
    return replace(request, items=items, radix_keys=keys)
