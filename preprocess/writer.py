"""A conversation to a prompt: template, tokens, the places of pictures, positions."""

from collections.abc import Sequence

import numpy as np

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput
from mmserve.preprocess.layout import lay_out, radix_keys
from mmserve.preprocess.media import Medium
from mmserve.preprocess.positions import mrope
from mmserve.preprocess.prompt import Prompt
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.template import ChatTemplate
from mmserve.preprocess.tokenizer import Marker, TextTokenizer
from mmserve.preprocess.work import Stages


class Writer:
    """Lays out prompts for one model; safe from many threads."""

    def __init__(self, spec: ProcessorSpec) -> None:
        self.spec = spec
        self.text = TextTokenizer(spec)
        self._template = ChatTemplate(spec.chat_template, spec.special_tokens) if spec.chat_template else None

    def lay_out(self, chat: ChatInput, media: Sequence[Medium]) -> Prompt:
        """The prompt of ``chat``. Of ``media`` only shapes, digests and times are read, never pixels."""
        stages = Stages()
        ids = self.chat_tokens(chat, stages)
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
        )

    def chat_tokens(self, chat: ChatInput, stages: Stages | None = None) -> list[int]:
        """Token ids of a conversation or raw prompt, with one placeholder for each picture or clip."""
        stages = stages or Stages()
        if isinstance(chat.prompt, tuple):
            return self._checked(chat.prompt)
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

    def _checked(self, ids: tuple[int, ...]) -> list[int]:
        for token in ids:
            if not 0 <= token < self.text.size:
                raise InvalidRequest(
                    f"there is no token {token}; this model's are 0 to {self.text.size - 1}", param="prompt"
                )
        return list(ids)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
