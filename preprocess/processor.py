"""From a caller's messages to all that the engine needs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest, MediaError
from mmserve.core.messages import ChatInput, ImagePart, Seen, VideoPart
from mmserve.preprocess.budget import check_pixel_limits, image_size
from mmserve.preprocess.image import Picture, background_color, decode_image, from_pixels
from mmserve.preprocess.layout import lay_out, radix_keys
from mmserve.preprocess.media import Medium, item_digest, naming
from mmserve.preprocess.positions import mrope
from mmserve.preprocess.prompt import Prepared, Prompt, to_prepared
from mmserve.preprocess.resize import resize
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.template import ChatTemplate
from mmserve.preprocess.tokenizer import Marker, TextTokenizer
from mmserve.preprocess.video import read_video
from mmserve.preprocess.work import Stages, Work

MediaPart = ImagePart | VideoPart


class Processor:
    """Preprocessing for one model, safe to call from many threads.

    ``prepare`` is ``see`` for every part (the heavy work, one call for each can run on its own worker)
    and then ``assemble``.
    """

    def __init__(self, spec: ProcessorSpec, media: MediaOptions) -> None:
        self.spec = spec
        self.media = media
        self.text = TextTokenizer(spec)
        self._template = ChatTemplate(spec.chat_template, spec.special_tokens) if spec.chat_template else None
        background_color(media)

    # ------------------------------------------------------------ requests

    def prepare(self, chat: ChatInput) -> Prepared:
        """All steps in this thread. InvalidRequest or MediaError names the part that is wrong."""
        return self.assemble(chat, [self.see(part) for part in self.parts(chat)])

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
        return to_prepared(chat, media, self.lay_out(chat, media))

    # ------------------------------------------------------------ text

    def lay_out(self, chat: ChatInput, media: Sequence[Medium]) -> Prompt:
        """The prompt of ``chat``. Of ``media`` only shapes, digests and times are read, never pixels."""
        stages = Stages()
        ids = self.chat_tokens(chat, stages)
        if not ids:
            raise InvalidRequest("the prompt is empty", param="messages")
        with stages.timing("layout"):
            layout = lay_out(ids, media, self.spec, self.text.encode)
            positions, delta = mrope(len(layout.token_ids), layout.blocks)
            return Prompt(
                token_ids=_frozen(layout.token_ids),
                radix_keys=_frozen(radix_keys(layout, media)),
                positions=_frozen(positions),
                position_delta=delta,
                spans=layout.spans,
                stages=stages.seconds,
            )

    def chat_tokens(self, chat: ChatInput, stages: Stages | None = None) -> list[int]:
        """Token ids of a conversation or raw prompt, with one placeholder for each picture or clip."""
        stages = stages or Stages()
        if chat.prompt is not None:
            with stages.timing("tokenise"):
                return self.text.encode(chat.prompt)
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use a raw prompt", param="messages")
        marker = Marker(self.text.reserved)
        with stages.timing("template"):
            text = self._template.render(
                chat.messages,
                marker,
                add_generation_prompt=chat.add_generation_prompt,
                kwargs=chat.template_kwargs,
            )
        with stages.timing("tokenise"):
            return self.text.encode_marked(text, marker)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of text in which reserved tokens count."""
        return self.text.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.text.decode(ids, skip_special_tokens=skip_special_tokens)

    def count(self, text: str) -> int:
        return len(self.text.encode(text))

    # ------------------------------------------------------------ pictures and clips

    def see(self, part: MediaPart, work: Work | None = None) -> Medium:
        """Decode and resize one part, into memory that ``work`` gives; errors carry the part's ``param``."""
        work = work or Work()
        with naming(part.param):
            check_pixel_limits(part.min_pixels, part.max_pixels)
            medium = self._look(part, work)
        return replace(medium, stages=work.stages.seconds)

    def _look(self, part: MediaPart, work: Work) -> Medium:
        if isinstance(part, VideoPart):
            return read_video(part, self.spec, self.media, work)
        with work.stages.timing("decode"):
            picture = self._picture(part)
        work.check()
        return self._still(picture, part, work)

    def _picture(self, part: ImagePart) -> Picture:
        if part.data is not None:
            return decode_image(part.data, self.media, part.background)
        if part.pixels is not None:
            return from_pixels(part.pixels, self.media)
        raise MediaError("the image part has neither data nor pixels")

    def _still(self, picture: Picture, part: ImagePart, work: Work) -> Medium:
        spec = self.spec
        ceiling = self.media.max_image_pixels
        size = image_size(*picture.size, spec, part.min_pixels, part.max_pixels, ceiling)
        pixels = work.allocate((1, *size, 3))
        with work.stages.timing("resize"):
            np.copyto(pixels[0], resize(picture.image, size))
        _frozen(pixels)
        with work.stages.timing("digest"):
            digest = item_digest(pixels, spec)
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
        return Medium("image", grid, (pixels,), (digest,), seen)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
