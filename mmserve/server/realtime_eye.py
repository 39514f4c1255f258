"""A camera in a realtime session: frames in, what became of them out, and answers about what is seen."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from msgspec import Struct

from mmserve.core.errors import InvalidRequest, MMServeError
from mmserve.core.messages import ImagePart, TextPart
from mmserve.live.desk import LiveDesk
from mmserve.live.frame import Fate, Frame
from mmserve.live.session import Closed, Event, Failed, FrameAck, LiveSession, Piece, Spoken, Triggered
from mmserve.parsing.combined import AnswerParser
from mmserve.parsing.events import joined
from mmserve.server.errors import unsupported
from mmserve.server.parsed import up_to_first_call
from mmserve.server.realtime_events import Teller
from mmserve.server.realtime_items import Item
from mmserve.server.realtime_response import Said
from mmserve.server.realtime_settings import Settings, Wanted
from mmserve.server.socket_door import INTERNAL, close_code

log = logging.getLogger("mmserve.server")

ENDED = 1000


class Watched(Protocol):
    """A camera that somebody else feeds (``Cameras``), and that goes on without us."""

    session: LiveSession
    ended: asyncio.Event
    why: str


class Opening(Struct, kw_only=True):
    """How a session that is our own begins: its settings and what was said before the first frame."""

    desk: LiveDesk
    settings: Settings
    standing: Wanted | None
    items: tuple[Item, ...]
    template_kwargs: dict[str, Any]
    owner: str


class Eye:
    """One camera, our own or another's.

    Ours is opened by its first frame; those that come meanwhile supersede each other. ``answered`` is called
    with each answer that the session gives by itself, ``failed`` with what kept it from being opened.
    """

    def __init__(
        self,
        tell: Teller,
        settings: Callable[[], Settings],
        answered: Callable[[AsyncGenerator[Said, None]], None],
        end: Callable[[int, str], None],
    ) -> None:
        self._teller, self._settings = tell, settings
        self._answered, self._end = answered, end
        self._session: LiveSession | None = None
        self._ours = True
        self._opened = asyncio.Event()
        self._slot: Frame | None = None
        self._answers: dict[int, asyncio.Queue[Piece | MMServeError]] = {}  # by itself, until it has ended
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, opening: Opening) -> None:
        """Begin a session of our own."""
        self._spawn(self._open(opening))

    def attach(self, camera: Watched) -> None:
        """Watch a camera that somebody else feeds."""
        self._ours = False
        self._spawn(self._until_ended(camera))
        self._watch(camera.session)
        self._opened.set()

    @property
    def ours(self) -> bool:
        return self._ours

    def put(self, frame: Frame) -> None:
        """Take a frame; it never waits."""
        if self._session is not None:
            self._session.put(frame)
            return
        if self._slot is not None:
            self.told(self._slot, "superseded")
        self._slot = frame

    def drop(self, frame: Frame, reason: Fate) -> None:
        """Count a frame that came to nothing before anybody looked at it."""
        if self._session is not None:
            self._session.drop(reason, frame.seq, frame.captured)
        else:
            self.told(frame, reason)

    def told(self, frame: Frame, reason: Fate) -> None:
        """Tell what became of a frame that no session knows of."""
        age_ms = (time.monotonic() - frame.captured) * 1000
        self._ack(FrameAck(seq=frame.seq, kept=False, reason=reason, age_ms=max(0.0, age_ms)))

    async def session(self) -> LiveSession:
        """The session, as soon as it is open."""
        await self._opened.wait()
        assert self._session is not None
        return self._session

    async def tell(self, item: Item) -> None:
        """Put an item of the conversation into what the model knows."""
        if item.shown.get("role") == "system":
            raise unsupported(
                "item.role", "beside a camera there are no system items; set the instructions of the session"
            )
        session = await self.session()
        for message in item.messages:
            await session.tell(message, item.id)

    async def forget(self, item: Item) -> None:
        """Take an item out again; InvalidRequest where it has become a part of what is remembered."""
        session = await self.session()
        if item.messages and not await session.forget(item.id):
            raise InvalidRequest(
                "beside a camera answers cannot be deleted; memory says for how long they are remembered",
                param="item_id",
            )

    async def update(
        self,
        old: Settings,
        new: Settings,
        template_kwargs: dict[str, Any] | None,
        standing: Wanted | None,
    ) -> None:
        """Let the session have what has changed; ``standing`` is how it answers by itself."""
        session = await self.session()
        await session.update(
            policy=None if new.policy == old.policy else new.policy,
            instructions=None if new.instructions == old.instructions else new.instructions,
            template_kwargs=template_kwargs,
            **_manner(standing),
        )

    async def ask(
        self, wanted: Wanted, parts: Sequence[TextPart | ImagePart], request_id: str
    ) -> AsyncGenerator[Said, None]:
        """The answer about what is seen now."""
        session = await self.session()
        answer = session.ask(
            parts,
            sampling=wanted.sampling,
            stop=wanted.stop,
            remember=wanted.conversation == "auto",
            request_id=request_id,
            deadline_ms=wanted.deadline_ms,
        )
        async with aclosing(_parsed(answer, wanted)) as pieces:
            async for said in pieces:
                yield said

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None and self._ours:
            await self._session.close("the client left")

    # ------------------------------------------------------------ opening

    async def _open(self, opening: Opening) -> None:
        settings = opening.settings
        system = [item.words for item in opening.items if item.shown.get("role") == "system"]
        try:
            session = await opening.desk.open(
                settings.policy,
                instructions="\n\n".join(filter(None, [settings.instructions, *system])) or None,
                owner=opening.owner,
                template_kwargs=opening.template_kwargs or None,
            )
            await session.update(**_manner(opening.standing))
            self._watch(session)
            if self._slot is not None:
                session.put(self._slot)
            for item in opening.items:
                if item.shown.get("role") != "system":
                    for message in item.messages:
                        await session.tell(message, item.id)
        except MMServeError as error:
            self._teller.fault(error)
            self._end(close_code(error), error.message)
        else:
            self._opened.set()

    def _watch(self, session: LiveSession) -> None:
        self._session = session
        self._spawn(self._listen(session, session.events()))
        self._spawn(self._tell_stats(session))

    async def _until_ended(self, camera: Watched) -> None:
        await camera.ended.wait()
        self._end(ENDED, camera.why)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A fault of ours ends the client, which would wait for its camera for ever."""
        try:
            await work
        except Exception:
            log.exception("a fault in watching a camera for a realtime client")
            self._end(INTERNAL, "the server failed; its log has the cause")

    # ------------------------------------------------------------ what happens

    async def _listen(self, session: LiveSession, events: AsyncIterator[Event]) -> None:
        async for event in events:
            match event:
                case FrameAck():
                    self._ack(event)
                case Triggered():
                    heard = self._answers[event.answer] = asyncio.Queue()
                    self._answered(self._triggered(session, heard))
                case Spoken():
                    self._hear(event.answer, event.piece, event.piece.finish_reason is not None)
                case Failed():
                    error = MMServeError(event.error["message"], code=event.error.get("code"))
                    self._hear(event.answer, error, True)
                case Closed() if self._ours:
                    self._end(ENDED, event.reason)

    def _hear(self, answer: int, piece: Piece | MMServeError, last: bool) -> None:
        if answer in self._answers:
            self._answers[answer].put_nowait(piece)
        if last:
            self._answers.pop(answer, None)

    def _ack(self, ack: FrameAck) -> None:
        wanted = self._settings().own.frame_ack
        if wanted == "all" or (wanted == "kept" and ack.kept):
            age_ms = round(ack.age_ms, 1)
            self._teller.tell(
                "mmserve.frame.ack", seq=ack.seq, kept=ack.kept, reason=ack.reason, age_ms=age_ms
            )

    async def _triggered(
        self, session: LiveSession, heard: asyncio.Queue[Piece | MMServeError]
    ) -> AsyncGenerator[Said, None]:
        """An answer that the session gives by itself; leaving it early cancels it."""
        whole = False
        try:
            async with aclosing(_parsed(_pieces(heard), None)) as pieces:
                async for said in pieces:
                    whole = said.finish is not None
                    yield said
        finally:
            if not whole:
                session.cancel()

    async def _tell_stats(self, session: LiveSession) -> None:
        while True:
            every = self._settings().own.stats_every_s
            await asyncio.sleep(every or 1.0)
            if every:
                self._teller.tell("mmserve.stats", stats=session.stats())


def _manner(standing: Wanted | None) -> dict[str, Any]:
    return {} if standing is None else {"sampling": standing.sampling, "stop": standing.stop}


async def _pieces(heard: asyncio.Queue[Piece | MMServeError]) -> AsyncGenerator[Piece, None]:
    """An answer that is heard piece by piece, to its last one."""
    while True:
        piece = await heard.get()
        if isinstance(piece, MMServeError):
            raise piece
        yield piece
        if piece.finish_reason is not None:
            return


async def _parsed(answer: AsyncGenerator[Piece, None], wanted: Wanted | None) -> AsyncGenerator[Said, None]:
    """The pieces of an answer, taken apart; ``wanted`` is None where nothing may be called."""
    parser: AnswerParser | None = None
    async with aclosing(answer) as pieces:
        async for piece in pieces:
            parser = parser or AnswerParser(piece.start, wanted.tools.schemas if wanted else None)
            events = parser.feed(piece.text)
            finish: str | None = piece.finish_reason
            if finish:
                events += parser.finish()
            if wanted and not wanted.tools.parallel and parser.calls:
                events, finish = up_to_first_call(events), "stop"
            yield Said(joined(events), piece.usage, finish, _rounded(piece.age_ms), piece.frame_seq)
            if finish:
                return


def _rounded(age_ms: float | None) -> float | None:
    return None if age_ms is None else round(age_ms, 1)
