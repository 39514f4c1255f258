"""How turns are written for the loaded model: found by rendering its own chat template around marks."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ImagePart, Message, Part, TextPart, VideoPart
from mmserve.core.thinking import Start, Thinking
from mmserve.preprocess.template import ChatTemplate
from mmserve.preprocess.tokenizer import Marker
from mmserve.preprocess.writer import Writer

Role = Literal["user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("user", "assistant", "tool")


class ChatText:
    """The texts between what people, cameras and the model say, as token ids.

        head | frames, words | joint(user, None) | answer | joint(assistant, user) | frames, words | ...

    ``head`` ends where the content of the first user turn begins. A joint closes a turn of one role and opens
    that of another; None stands for the answer that is to be generated. ``kwargs`` (tools, say) are the
    template's. InvalidRequest where the template does not show contents as they are, or refuses.
    """

    def __init__(
        self, writer: Writer, instructions: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if writer.template is None:
            raise InvalidRequest("this model has no chat template; live sessions need one", param="model")
        self._writer = writer
        self._template: ChatTemplate = writer.template
        self._marker = Marker(writer.text.reserved)
        self._kwargs = dict(kwargs or {})
        self._system = () if instructions is None else (Message("system", (TextPart(instructions),)),)
        self._marks = [f"m{secrets.token_hex(12)}x" for _ in range(5)]
        self._joints: dict[str, tuple[list[int], Start]] = {}
        head, clip = self._around(VideoPart())
        self.head = self._ids(head)
        self.clip = self._ids(clip)  # with one placeholder
        self.still = self._ids(self._around(ImagePart())[1])

    def joint(self, before: Role, after: Role | None, kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids that close a turn of the role ``before`` and open one of ``after``, or the answer.

        ``kwargs`` are added to the template's for this answer.
        """
        return self._joint(before, after, kwargs)[0]

    def start(self, before: Role, kwargs: Mapping[str, Any] | None = None) -> Start:
        """Where an answer after a turn of the role ``before`` begins."""
        return self._joint(before, None, kwargs)[1]

    def thinking(self, start: Start) -> Thinking | None:
        """How the thoughts of such an answer are told; None where there will be none."""
        return self._writer.told(start)

    def literal(self, text: str) -> list[int]:
        """Token ids of somebody's words; reserved tokens among them are spelled out."""
        return self._writer.text.encode_literal(text)

    def content(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of the parts of a turn, with one placeholder for each picture."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, TextPart):
                ids += self.literal(part.text)
            elif isinstance(part, ImagePart):
                ids += self.still
            else:
                raise InvalidRequest(
                    "a clip cannot stand in a live session; send its frames", param="content"
                )
        return ids

    # ------------------------------------------------------------ rendering

    def _around(self, part: Part) -> list[str]:
        """What stands before the content of the first turn, and what ``part`` is in it."""
        before, behind = self._marks[:2]
        content = (TextPart(before), part, TextPart(behind))
        text = self._render((*self._system, Message("user", content)), answer=True, kwargs={})
        return self._cut(text, (before, behind))[:2]

    def _joint(
        self, before: Role, after: Role | None, kwargs: Mapping[str, Any] | None
    ) -> tuple[list[int], Start]:
        key = json.dumps([before, after, dict(kwargs or {})], sort_keys=True, default=repr)
        if key not in self._joints:
            if len(self._joints) > 64:
                self._joints.clear()
            self._joints[key] = self._found_joint(before, after, dict(kwargs or {}))
        return self._joints[key]

    def _found_joint(
        self, before: Role, after: Role | None, kwargs: dict[str, Any]
    ) -> tuple[list[int], Start]:
        turns = [*_LEADING[before], before, *([after] if after else [])]
        if after and after != "user":
            turns.append("user")  # templates write the last answer in a way of its own
        marks = self._marks[: len(turns)]
        messages = [Message(role, (TextPart(mark),)) for role, mark in zip(turns, marks, strict=True)]
        text = self._render((*self._system, *messages), answer=after is None, kwargs=kwargs)
        found = self._cut(text, marks)[len(_LEADING[before]) + 1]
        return self._ids(found), Start.of(found, self._writer.thinks)

    def _render(self, messages: Sequence[Message], *, answer: bool, kwargs: dict[str, Any]) -> str:
        return self._template.render(
            messages, self._marker, add_generation_prompt=answer, kwargs={**self._kwargs, **kwargs}
        )

    def _cut(self, text: str, marks: Sequence[str]) -> list[str]:
        """``text`` in pieces between ``marks``, each of which must stand in it once, in this order."""
        pieces = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found or mark in text:
                raise InvalidRequest(
                    "the model's chat template does not show what is said as it is, so it cannot be used in a"
                    " live session",
                    param="messages",
                )
            pieces.append(before)
        return [*pieces, text]

    def _ids(self, text: str) -> list[int]:
        return self._writer.text.encode_marked(text, self._marker)


_LEADING: dict[Role, tuple[Role, ...]] = {"user": (), "assistant": ("user",), "tool": ("user", "assistant")}
