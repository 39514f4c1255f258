"""A conversation to a prompt: template, tokens, the places of pictures, positions."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput
from mmserve.core.thinking import CLOSE, CLOSING, OPEN, Start, Thinking
from mmserve.preprocess.bad_words import spelled
from mmserve.preprocess.layout import lay_out, radix_keys
from mmserve.preprocess.media import Medium
from mmserve.preprocess.positions import mrope
from mmserve.preprocess.prompt import Prompt
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.template import ChatTemplate
from mmserve.preprocess.tokenizer import Marker, TextTokenizer
from mmserve.preprocess.work import Stages

TAIL = 256  # characters at the end of a prompt, which tell where its answer begins


class Writer:
    """Lays out prompts for one model; safe from many threads."""

    def __init__(self, spec: ProcessorSpec) -> None:
        self.spec = spec
        self.text = TextTokenizer(spec)
        self.template = ChatTemplate(spec.chat_template, spec.special_tokens) if spec.chat_template else None
        self.thinks = OPEN in (spec.chat_template or "")
        self._thinking = _thinking(self.text, spec)

    def lay_out(self, chat: ChatInput, media: Sequence[Medium]) -> Prompt:
        """The prompt of ``chat``. Of ``media`` only shapes, digests and times are read, never pixels."""
        stages = Stages()
        ids, start = self._written(chat, stages)
        if not ids:
            raise InvalidRequest("the prompt is empty", param="messages")
        with stages.timing("layout"):
            layout = lay_out(ids, media, self.spec, self.text.encode)
            positions, delta = mrope(len(layout.token_ids), layout.blocks)
            keys = radix_keys(layout, media)
        return Prompt(
            token_ids=_frozen(layout.token_ids),
            radix_keys=_frozen(keys),
            positions=_frozen(positions),
            position_delta=delta,
            spans=layout.spans,
            stages=stages.seconds,
            start=start,
            thinking=self.told(start),
            bad_words=spelled(chat.sampling.bad_words, self.text),
        )

    def chat_tokens(self, chat: ChatInput) -> list[int]:
        """Token ids of a conversation or raw prompt, with one placeholder for each picture or clip."""
        return self._written(chat, Stages())[0]

    def _written(self, chat: ChatInput, stages: Stages) -> tuple[list[int], Start]:
        """Token ids, and where the answer begins: what follows a raw prompt is the caller's matter."""
        if isinstance(chat.prompt, tuple):
            return self._checked(chat.prompt), Start.OUTSIDE
        if chat.prompt is not None:
            with stages.timing("tokenise"):
                return self.text.encode(chat.prompt), Start.OUTSIDE
        if self.template is None:
            raise InvalidRequest("this model has no chat template; use a raw prompt", param="messages")
        marker = Marker(self.text.reserved)
        with stages.timing("template"):
            text = self.template.render(
                chat.messages,
                marker,
                add_generation_prompt=chat.add_generation_prompt,
                kwargs=chat.template_kwargs,
            )
        with stages.timing("tokenise"):
            return self.text.encode_marked(text, marker), Start.of(text[-TAIL:], self.thinks)

    def told(self, start: Start) -> Thinking | None:
        """How the thoughts of an answer that begins so are told; None where there will be none."""
        if start is Start.OUTSIDE or self._thinking is None:
            return None
        return replace(self._thinking, inside=start is Start.INSIDE)

    def _checked(self, ids: tuple[int, ...]) -> list[int]:
        for token in ids:
            if not 0 <= token < self.text.size:
                raise InvalidRequest(
                    f"there is no token {token}; this model's are 0 to {self.text.size - 1}", param="prompt"
                )
        return list(ids)


def _thinking(text: TextTokenizer, spec: ProcessorSpec) -> Thinking | None:
    """How thoughts are told by token ids; None where the tags are no tokens."""
    opening, closing = text.encode(OPEN), text.encode(CLOSE)
    if len(opening) != 1 or len(closing) != 1:
        return None
    return Thinking(opening[0], closing[0], tuple(text.encode(CLOSING)), spec.eos_ids)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
