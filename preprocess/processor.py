"""From a caller's messages to all that the engine needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmserve.core.config import MediaOptions
from mmserve.core.digest import framed_digest
from mmserve.core.errors import InvalidRequest, MediaError
from mmserve.core.messages import (
    ChatInput,
    ImagePart,
    PreparedRequest,
    SamplingParams,
    VideoPart,
    VisionItem,
)
from mmserve.preprocess.budget import check_pixel_limits, image_size
from mmserve.preprocess.cache import MediumCache
from mmserve.preprocess.image import Picture, background_color, decode_image, from_pixels
from mmserve.preprocess.layout import Layout, lay_out, radix_keys
from mmserve.preprocess.media import Medium, Seen, item_digest, naming
from mmserve.preprocess.positions import mrope
from mmserve.preprocess.resize import resize
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.template import ChatTemplate
from mmserve.preprocess.tokenizer import Marker, TextTokenizer
from mmserve.preprocess.video import read_video

CACHE_BYTES = 256 << 20

MediaPart = ImagePart | VideoPart


@dataclass(frozen=True)
class Prepared:
    """A request for the engine, and what was seen of each picture and clip, in the order of the messages."""

    request: PreparedRequest
    seen: tuple[Seen, ...] = ()

    @property
    def image_tokens(self) -> int:
        return sum(s.tokens for s in self.seen if s.kind == "image")

    @property
    def video_tokens(self) -> int:
        return sum(s.tokens for s in self.seen if s.kind == "video")


class Processor:
    """Preprocessing for one model, safe to call from many threads.

    ``prepare`` is ``see`` for every part (the heavy work, one call for each can run on its own worker)
    and then ``assemble``.
    """

    def __init__(self, spec: ProcessorSpec, media: MediaOptions, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.spec = spec
        self.media = media
        self.text = TextTokenizer(spec)
        self.cache = MediumCache(cache_bytes)
        self._template = ChatTemplate(spec.chat_template, spec.special_tokens) if spec.chat_template else None
        background_color(media)

    # ------------------------------------------------------------ requests

    def prepare(self, chat: ChatInput) -> Prepared:
        """All steps in this thread. InvalidRequest or MediaError names the part that is wrong."""
        return self.assemble(chat, [self.see(part) for part in self.parts(chat)])

    def prepare_text(
        self,
        request_id: str,
        prompt: str,
        sampling: SamplingParams,
        parts: Sequence[MediaPart] = (),
        *,
        stop: tuple[str, ...] = (),
    ) -> Prepared:
        """A raw prompt: its reserved tokens count, its placeholders take ``parts`` in their order."""
        media = [self.see(part) for part in parts]
        ids = self.text.encode(prompt)
        request = self._request(ids, media, request_id=request_id, sampling=sampling, stop=stop)
        return Prepared(request, tuple(m.seen for m in media))

    def parts(self, chat: ChatInput) -> list[MediaPart]:
        """The pictures and clips of a conversation, in order; MediaError when there are too many."""
        found = [p for m in chat.messages for p in m.content if isinstance(p, ImagePart | VideoPart)]
        if len(found) > self.media.max_items:
            raise MediaError(
                f"there are {len(found)} pictures and clips; at most {self.media.max_items} are allowed",
                param="messages",
            )
        return found

    def assemble(self, chat: ChatInput, media: Sequence[Medium]) -> Prepared:
        """Template, tokens, layout and positions; ``media`` are the seen parts of ``chat``, in order."""
        ids = self.chat_tokens(chat)
        request = self._request(
            ids,
            media,
            request_id=chat.request_id,
            sampling=chat.sampling,
            stop=chat.stop,
            priority=chat.priority,
            deadline=chat.deadline,
            cache_salt=chat.cache_salt,
        )
        return Prepared(request, tuple(m.seen for m in media))

    # ------------------------------------------------------------ text

    def chat_tokens(self, chat: ChatInput) -> list[int]:
        """Token ids of a conversation, with one placeholder for each picture or clip."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use a raw prompt", param="messages")
        marker = Marker(self.text.reserved)
        prompt = self._template.render(
            chat.messages,
            marker,
            add_generation_prompt=chat.add_generation_prompt,
            kwargs=chat.template_kwargs,
        )
        return self.text.encode_marked(prompt, marker)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of text in which reserved tokens count."""
        return self.text.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.text.decode(ids, skip_special_tokens=skip_special_tokens)

    def count(self, text: str) -> int:
        return len(self.text.encode(text))

    # ------------------------------------------------------------ pictures and clips

    def see(self, part: MediaPart) -> Medium:
        """Decode and resize one part, or remember it; errors carry the part's ``param``."""
        with naming(part.param):
            check_pixel_limits(part.min_pixels, part.max_pixels)
            data = part.data
            if data is None:
                return self._look(part)
            medium, found = self.cache.get(_cache_key(part, data), lambda: self._look(part))
        return replace(medium, seen=replace(medium.seen, cached=True)) if found else medium

    def _look(self, part: MediaPart) -> Medium:
        if isinstance(part, VideoPart):
            return read_video(part, self.spec, self.media)
        if part.data is not None:
            return self._still(decode_image(part.data, self.media), part)
        if part.pixels is not None:
            return self._still(from_pixels(part.pixels, self.media), part)
        raise MediaError("the image part has neither data nor pixels")

    def _still(self, picture: Picture, part: ImagePart) -> Medium:
        spec = self.spec
        ceiling = self.media.max_image_pixels
        size = image_size(*picture.size, spec, part.min_pixels, part.max_pixels, ceiling)
        pixels = resize(picture.image, size)[None]
        pixels.setflags(write=False)
        grid = (size[0] // spec.patch, size[1] // spec.patch)
        seen = Seen(
            kind="image",
            format=picture.format,
            source_size=picture.size,
            size=size,
            grid=grid,
            tokens=grid[0] * grid[1] // spec.merge**2,
            orientation=picture.orientation,
        )
        return Medium("image", grid, (pixels,), (item_digest(pixels, spec),), seen)

    # ------------------------------------------------------------ the engine's input

    def _request(self, ids: Sequence[int], media: Sequence[Medium], **fields: Any) -> PreparedRequest:
        if not ids:
            raise InvalidRequest("the prompt is empty", param="messages")
        layout = lay_out(ids, media, self.spec, self.text.encode)
        positions, delta = mrope(len(layout.token_ids), layout.blocks)
        return PreparedRequest(
            token_ids=_frozen(layout.token_ids),
            radix_keys=_frozen(radix_keys(layout, media)),
            positions=_frozen(positions),
            position_delta=delta,
            items=_items(layout, media),
            **fields,
        )


def _items(layout: Layout, media: Sequence[Medium]) -> tuple[VisionItem, ...]:
    items = [
        VisionItem(
            digest=medium.digests[i],
            kind=medium.kind,
            grid=medium.grid,
            span=span,
            pixels=medium.pixels[i],
            timestamp=medium.timestamps[i] if medium.timestamps else None,
        )
        for medium, spans in zip(media, layout.spans, strict=True)
        for i, span in enumerate(spans)
    ]
    return tuple(sorted(items, key=lambda item: item.span))


def _cache_key(part: MediaPart, data: bytes) -> bytes:
    options = [part.min_pixels, part.max_pixels]
    if isinstance(part, VideoPart):
        options += [part.num_frames]
        return framed_digest("video", data, repr(options), repr(part.fps))
    return framed_digest("image", data, repr(options))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
