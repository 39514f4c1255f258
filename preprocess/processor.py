"""From a caller's messages to all that the engine needs, in one process."""

from collections.abc import Sequence

import numpy as np

from mmserve.core.config import MediaOptions
from mmserve.core.messages import ChatInput
from mmserve.preprocess.eye import Eye
from mmserve.preprocess.media import MediaPart, Medium, media_parts
from mmserve.preprocess.prompt import Prepared, to_prepared
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.work import Work
from mmserve.preprocess.writer import Writer


class Processor:
    """Preprocessing for one model, safe to call from many threads.

    ``prepare`` is ``see`` for every part (the heavy work, one call for each can run on its own worker)
    and then ``assemble``.
    """

    def __init__(self, spec: ProcessorSpec, media: MediaOptions) -> None:
        self.spec = spec
        self.media = media
        self.eye = Eye(spec, media)
        self.writer = Writer(spec)
        self.text = self.writer.text

    # ------------------------------------------------------------ requests

    def prepare(self, chat: ChatInput) -> Prepared:
        """All steps in this thread. InvalidRequest or MediaError names the part that is wrong."""
        return self.assemble(chat, [self.see(part) for part in self.parts(chat)])

    def parts(self, chat: ChatInput) -> list[MediaPart]:
        """The pictures and clips of a conversation, in order; MediaError when there are too many."""
        return media_parts(chat, self.media.max_items)

    def see(self, part: MediaPart, work: Work | None = None) -> Medium:
        """As ``Eye.see``."""
        return self.eye.see(part, work)

    def glance(self, data: bytes) -> np.ndarray:
        """As ``Eye.glance``."""
        return self.eye.glance(data)

    def assemble(self, chat: ChatInput, media: Sequence[Medium]) -> Prepared:
        """Template, tokens, layout and positions; ``media`` are the seen parts of ``chat``, in order."""
        return to_prepared(chat, media, self.writer.lay_out(chat, media))

    # ------------------------------------------------------------ text

    def chat_tokens(self, chat: ChatInput) -> list[int]:
        """Token ids of a conversation, with one placeholder for each picture or clip."""
        return self.writer.chat_tokens(chat)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of text in which reserved tokens count."""
        return self.text.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.text.decode(ids, skip_special_tokens=skip_special_tokens)

    def count(self, text: str) -> int:
        return len(self.text.encode(text))
