"""What a session remembers, as turns: the trunk, written as the model's chat template writes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import CarryOver, ImagePart, Message, Part, VideoPart
from mmserve.core.thinking import Start, Thinking
from mmserve.live.chat_text import ROLES, ChatText, Role
from mmserve.live.trunk import Source, Stretch, Trunk, lay
from mmserve.live.window import Window
from mmserve.preprocess.media import MediaPart, Medium
from mmserve.preprocess.writer import Writer

Media = Sequence[tuple[MediaPart, Medium]]


class Question(Struct, frozen=True):
    """What is put behind the trunk to have an answer: ``stretch`` with everything up to where the answer
    begins (``start``), ``thinking`` as its thoughts are told; ``said`` are the token ids of what was asked,
    and ``media`` its pictures."""

    stretch: Stretch
    said: tuple[int, ...]
    media: tuple[tuple[MediaPart, Medium], ...]
    start: Start
    thinking: Thinking | None


class Context:
    """A trunk whose frames and words stand in turns. ``salt`` is the caller's own ``cache_salt``."""

    def __init__(
        self,
        writer: Writer,
        instructions: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> None:
        self.writer = writer
        self._instructions = instructions
        self._kwargs = dict(kwargs or {})
        self._salt = salt
        self._turns = 0
        self.text = ChatText(writer, instructions, self._kwargs)
        self.trunk = Trunk(lay(self.text.head, writer), salt)

    # ------------------------------------------------------------ growing

    def add_frame(self, part: VideoPart, medium: Medium, at: float) -> None:
        """Show a frame, or several of one clip, that was captured ``at`` so many seconds."""
        self._open_user()
        self.trunk.append("frame", lay(self.text.clip, self.writer, [(part, medium)]), at=at)

    def tell(self, role: Role, parts: Sequence[Part], media: Media = (), name: str | None = None) -> None:
        """A turn, or for the user a part of one, that asks for nothing."""
        said = self.text.content(parts)
        if role == "tool" and self.trunk.role != "user":  # it belongs to the answer that called it
            self.trunk.extend(self._laid([*self.text.joint(self.trunk.role, role), *said], media), role)
            return
        self._open_user()
        opening = [] if role == "user" else self.text.joint("user", role)
        self.trunk.append("told", self._laid([*opening, *said], media), name=name, role=role)

    def remember(self, question: Question, answer: Sequence[int]) -> None:
        """``question`` has been answered with the tokens ``answer``; both become text of the trunk."""
        if not question.said and self.trunk.role != "user":  # what was told last was answered
            opening = self.text.joint(self.trunk.role, "assistant")
            self.trunk.extend(self._laid([*opening, *answer]), "assistant")
            return
        self._open_user()
        ids = [*question.said, *self.text.joint("user", "assistant"), *answer]
        stretch = self._laid(ids, question.media)
        self.trunk.append("exchange", stretch, turn=self._turns, role="assistant")

    def close_turn(self) -> int:
        """What was told since the last answer goes with the one that is being made now; its number."""
        self._turns += 1
        for segment in self.trunk.segments[1:]:
            if segment.kind == "told" and segment.turn is None:
                segment.turn = self._turns
        return self._turns

    def _open_user(self) -> None:
        if self.trunk.role != "user":
            self.trunk.extend(self._laid(self.text.joint(self.trunk.role, "user")), "user")

    @property
    def sees_whole(self) -> bool:
        """Whether the oldest frame is a whole one, so that those behind it have all that they go on from."""
        return next((s.key for s in self.trunk.segments if s.kind == "frame"), False)

    # ------------------------------------------------------------ asking

    def question(
        self, parts: Sequence[Part], media: Media = (), kwargs: Mapping[str, Any] | None = None
    ) -> Question:
        """``parts`` asked behind the trunk as it stands; without any, what was told last is answered."""
        said = self.text.content(parts)
        role = self.trunk.role
        if role == "assistant" and not said:
            raise InvalidRequest("nothing was asked since the last answer", param="content")
        opening = self.text.joint(role, "user") if said and role != "user" else []
        asking: Role = "user" if said else role
        ids = [*opening, *said, *self.text.joint(asking, None, kwargs)]
        start = self.text.start(asking, kwargs)
        return Question(self._laid(ids, media), tuple(said), tuple(media), start, self.text.thinking(start))

    # ------------------------------------------------------------ shrinking

    def fit(self, window: Window) -> CarryOver | None:
        """Drop what ``window`` says; what the engine is to carry over, if anything changed."""
        plan = window.plan(self.trunk.segments, self.trunk.next_position)
        return self.trunk.drop(plan.drop, rebase=plan.rebase) if plan else None

    def forget(self, name: str) -> CarryOver | None:
        """Drop what was told as ``name``."""
        return self.trunk.drop({s.number for s in self.trunk.segments[1:] if s.name == name})

    def rewritten(self, instructions: str | None, kwargs: Mapping[str, Any] | None) -> "Context":
        """The same turns behind another head, laid out anew: nothing of what was computed fits it."""
        new = Context(
            self.writer,
            self._instructions if instructions is None else instructions,
            self._kwargs if kwargs is None else kwargs,
            self._salt,
        )
        new._turns = self._turns
        for segment, stretch in self.trunk.stretches():
            new.trunk.append(
                segment.kind, stretch, at=segment.at, name=segment.name, turn=segment.turn, role=segment.role
            )
        return new

    def _laid(self, ids: Sequence[int], media: Media = ()) -> Stretch:
        return lay(ids, self.writer, media)


def told(message: Message) -> tuple[Role, tuple[Part, ...]]:
    """The role and the parts of a turn; InvalidRequest for what cannot stand in a session."""
    if message.role not in ROLES:
        raise InvalidRequest(
            f"role must be one of {', '.join(ROLES)}, not {message.role!r}; instructions are given apart",
            param="role",
        )
    for part in message.content:
        if isinstance(part, VideoPart):
            raise InvalidRequest("a clip cannot stand in a live session; send its frames", param="content")
    role: Role = message.role
    return role, message.content


def images(parts: Sequence[Part]) -> list[ImagePart]:
    return [part for part in parts if isinstance(part, ImagePart)]


def vision_tokens(stretch_items: Sequence[Any]) -> dict[str, int]:
    """Tokens under items by their kind."""
    counts = {"image": 0, "video": 0}
    for item in stretch_items:
        counts[item.kind] += item.span[1] - item.span[0]
    return counts


def sources_of(question: Question, trunk: Trunk) -> list[Source]:
    return [*trunk.sources(), *question.stretch.sources]
