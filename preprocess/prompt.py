"""A prompt that is laid out, and the engine's request made from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput, PreparedRequest, SamplingParams, Seen, VisionItem
from mmserve.core.thinking import Start, Thinking
from mmserve.preprocess.media import Medium

Spans = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Prompt:
    """Words and pictures as tokens: all that a request needs beside its pixels.

    ``token_ids`` int32 [N], ``radix_keys`` int64 [N], ``positions`` int32 [3, N], read-only;
    ``spans[m][i]`` is the token range of item i of medium m; ``stages`` seconds by stage. ``start`` is where
    the answer begins; ``thinking``, without a budget yet, how its thoughts are told, None if there are none;
    ``bad_words`` the tokens of what must not come in it.
    """

    token_ids: np.ndarray
    radix_keys: np.ndarray
    positions: np.ndarray
    position_delta: int
    spans: Spans
    stages: Mapping[str, float] = field(default_factory=dict)
    start: Start = Start.OUTSIDE
    thinking: Thinking | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A request for the engine, and what was seen of each picture and clip, in the order of the messages.

    ``stages`` are seconds by stage of the text; those of a picture or clip are on its ``Medium``. The answer
    begins at ``start``. ``digests[m]`` are those of the items of medium m.
    """

    request: PreparedRequest
    seen: tuple[Seen, ...] = ()
    stages: Mapping[str, float] = field(default_factory=dict)
    start: Start = Start.OUTSIDE
    digests: tuple[tuple[bytes, ...], ...] = ()

    @property
    def image_tokens(self) -> int:
        return sum(s.tokens for s in self.seen if s.kind == "image")

    @property
    def video_tokens(self) -> int:
        return sum(s.tokens for s in self.seen if s.kind == "video")


def to_prepared(chat: ChatInput, media: Sequence[Medium], prompt: Prompt) -> Prepared:
    """The engine's request: ``prompt`` joined with the pixels of ``media``, which are not copied."""
    assert bool(prompt.bad_words) == bool(chat.sampling.bad_words), "words that nobody has spelled"
    request = PreparedRequest(
        request_id=chat.request_id,
        token_ids=prompt.token_ids,
        radix_keys=prompt.radix_keys,
        positions=prompt.positions,
        position_delta=prompt.position_delta,
        items=items_of(media, prompt.spans),
        sampling=chat.sampling,
        stop=chat.stop,
        owner=chat.owner,
        priority=chat.priority,
        deadline=chat.deadline,
        cache_salt=chat.cache_salt,
        thinking=thinking_of(prompt.thinking, prompt.start, chat.sampling),
        bad_words=prompt.bad_words,
    )
    digests = tuple(m.digests for m in media)
    return Prepared(request, tuple(m.seen for m in media), prompt.stages, prompt.start, digests)


def thinking_of(thinking: Thinking | None, start: Start, sampling: SamplingParams) -> Thinking | None:
    """How this request's thoughts are told; InvalidRequest if they have a budget that cannot be kept."""
    if thinking is not None:
        ends = (*thinking.ends, *sampling.stop_token_ids)
        return replace(thinking, ends=ends, budget=sampling.thinking_budget)
    if sampling.thinking_budget is not None and start is not Start.OUTSIDE:
        raise InvalidRequest(
            "this model's tokenizer has no token for the end of thoughts, so they can have no budget",
            param="thinking_token_budget",
        )
    return None


def items_of(media: Sequence[Medium], spans: Spans) -> tuple[VisionItem, ...]:
    """The items of all ``media``, each at its place in the prompt, in the order of their places."""
    items = [
        VisionItem(
            digest=medium.digests[i],
            kind=medium.kind,
            grid=medium.grid,
            kept=medium.kept_of(i),
            span=span,
            pixels=medium.pixels[i],
            timestamp=medium.timestamps[i] if medium.timestamps else None,
        )
        for medium, own in zip(media, spans, strict=True)
        for i, span in enumerate(own)
    ]
    return tuple(sorted(items, key=lambda item: item.span))
