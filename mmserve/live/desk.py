"""What live sessions need of a service, and the list of those that are open."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from copy import copy
from typing import Any

import numpy as np

from mmserve.advice import advised
from mmserve.answer import Said
from mmserve.answering import AnswerEngine, PixelsAgain
from mmserve.core.config import Config
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import CarryOver, ImagePart, PreparedRequest, SamplingParams, VideoPart
from mmserve.core.metrics import Metrics
from mmserve.live.admission import Capacity
from mmserve.live.context import Context
from mmserve.live.policy import SessionPolicy
from mmserve.live.session import LiveSession
from mmserve.live.window import Limits
from mmserve.models.config import read_config
from mmserve.preprocess.desk import PrepareDesk
from mmserve.preprocess.media import MediaPart, Medium
from mmserve.preprocess.writer import Writer

ANSWER_TOKENS = 256  # of an answer, where nobody says how many
ROOM = 1024  # tokens left free for a question and its answer; a quarter of the model's where that is less


class LiveDesk:
    """Opens sessions (``service.live.open``), and is the service to them."""

    def __init__(
        self, config: Config, writer: Writer, prepare: PrepareDesk, engine: AnswerEngine, metrics: Metrics
    ) -> None:
        self.config = config
        self.writer = writer
        self.metrics = metrics
        self.capacity = Capacity(config.live.live_load, config.live.max_live_sessions)
        self.sessions: set[LiveSession] = set()
        self._prepare = prepare
        self._engine = engine
        self._max_position = read_config(writer.spec.folder).max_position

    async def open(
        self,
        policy: SessionPolicy | None = None,
        *,
        instructions: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        owner: str = "",
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> LiveSession:
        """A new session, in the running event loop.

        ``sampling`` is that of answers where a question does not bring its own; without it, what the model's
        makers advise, and ``ANSWER_TOKENS`` at most. Overloaded, with the reason,
        when there is no room for another camera; InvalidRequest for what the model's template refuses.
        """
        policy = policy or SessionPolicy()
        context = Context(self.writer, instructions, template_kwargs, cache_salt)
        if len(context.trunk) > self.limits.tokens // 2:
            raise InvalidRequest(
                f"the instructions have {len(context.trunk)} tokens; at most {self.limits.tokens // 2} leave"
                " room for what is seen",
                param="instructions",
            )
        if sampling is None:
            sampling = advised(self.writer.spec.sampling, max_tokens=ANSWER_TOKENS)
        seat = self.capacity.admit(policy)
        session = LiveSession(self, policy, context, seat, sampling=sampling, owner=owner, priority=priority)
        self.sessions.add(session)
        return session

    def with_positions(self, most: int) -> "LiveDesk":
        """The same desk for a model that ends at position ``most``: its sessions are moved back sooner. For
        trying that out."""
        desk = copy(self)
        desk._max_position = min(most, self._max_position)
        return desk

    # ------------------------------------------------------------ what sessions ask

    @property
    def lives(self) -> int:
        """How many times the engine has been started: what it had computed before is lost."""
        return self._engine.lives

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt with its answer, as far as is known here."""
        most = [self._max_position]
        if self.config.model.max_model_len is not None:
            most.append(self.config.model.max_model_len)
        if pages := self._engine.stats().get("kv_pages"):
            most.append(int(pages) * self.config.cache.page_size)
        return min(most)

    @property
    def limits(self) -> Limits:
        """What a trunk may have, which leaves room for a question."""
        tokens = self.context_tokens
        return Limits(
            tokens=tokens - min(ROOM, tokens // 4),
            positions=self._max_position - min(ROOM, self._max_position // 4),
        )

    @property
    def max_position(self) -> int:
        return self._max_position

    @property
    def watches_ahead(self) -> bool:
        """Whether what is computed before a question is there when it comes."""
        return self.config.cache.prefix_caching

    @property
    def max_frame_bytes(self) -> int:
        return min(self.config.realtime.max_frame_bytes, self.config.media.max_image_bytes)

    async def glance(self, data: bytes, request: object) -> np.ndarray:
        return await self._prepare.glance(data, request)

    async def see(self, part: VideoPart | ImagePart) -> Medium:
        return await self._prepare.look(part)

    async def pixels_of(self, parts: Iterable[MediaPart]) -> dict[bytes, np.ndarray]:
        return await self._prepare.pixels_of(parts)

    def encoded(self, digests: Iterable[bytes]) -> None:
        self._prepare.encoded(digests)

    def answer(self, request: PreparedRequest, pixels: PixelsAgain) -> AsyncGenerator[Said, None]:
        return self._engine.answer(request, pixels)

    async def carry_over(self, order: CarryOver) -> int:
        if not self.watches_ahead:
            return 0
        return await self._engine.carry_over(order)

    def left(self, session: LiveSession) -> None:
        """``session`` has ended."""
        self.sessions.discard(session)

    def stats(self) -> dict[str, Any]:
        sessions = list(self.sessions)
        return {
            **self.capacity.stats(),
            "live_context_tokens": sum(session.context_tokens for session in sessions),
            "live_kept_bytes": sum(session.kept_bytes for session in sessions),
        }
