"""One camera that is watched, and what is asked about it."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from mmserve.answer import Said
from mmserve.answering import PixelsAgain
from mmserve.core.errors import EngineDead, MediaError, MMServeError
from mmserve.core.messages import (
    CarryOver,
    ImagePart,
    Message,
    Part,
    PreparedRequest,
    SamplingParams,
    TextPart,
    Timings,
    VideoPart,
)
from mmserve.core.metrics import Metrics
from mmserve.live.admission import Seat
from mmserve.live.ages import Ages
from mmserve.live.answers import Answers, Asked
from mmserve.live.context import Context, images, told
from mmserve.live.events import (
    Closed,
    Event,
    Failed,
    FrameAck,
    Listeners,
    Piece,
    Spoken,
    TriggerCause,
    Triggered,
)
from mmserve.live.frame import FATES, Cause, Fate, Frame, Times
from mmserve.live.policy import SessionPolicy
from mmserve.live.triggers import Triggers
from mmserve.live.trunk import Source, Trunk
from mmserve.live.watch import Watcher, fate_of
from mmserve.live.window import Limits, Window
from mmserve.preprocess.media import MediaPart, Medium

__all__ = ["Closed", "Event", "Failed", "FrameAck", "LiveSession", "Piece", "Spoken", "Triggered"]

log = logging.getLogger(__name__)

SETTLE_S = 0.5  # that a question waits for frames that came before it
FIRST_S = 5.0  # and for the first frame of all
RETRY_S = 0.25  # before a context that could not be computed is computed again


class Host(Protocol):
    """What a session asks of a service; ``LiveDesk`` is the real one."""

    metrics: Metrics

    @property
    def lives(self) -> int: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def watches_ahead(self) -> bool: ...
    @property
    def max_frame_bytes(self) -> int: ...
    async def glance(self, data: bytes, request: object) -> np.ndarray: ...
    async def see(self, part: VideoPart | ImagePart) -> Medium: ...
    async def pixels_of(self, parts: Iterable[MediaPart]) -> dict[bytes, np.ndarray]: ...
    def encoded(self, digests: Iterable[bytes]) -> None: ...
    def answer(self, request: PreparedRequest, pixels: PixelsAgain) -> AsyncGenerator[Said, None]: ...
    async def carry_over(self, order: CarryOver) -> int: ...
    def left(self, session: "LiveSession") -> None: ...


class LiveSession:
    """Made by ``LiveDesk.open`` (``service.live.open(policy, instructions=...)``) in a running event loop,
    where all but ``put`` is to be called. ``close`` it when done.

    Beside the loop that watches, answers run one at a time; both read the context, which is changed under
    ``_writing`` alone, and hand the engine snapshots of it. ``changed`` are called with each new policy.
    """

    def __init__(
        self,
        host: Host,
        policy: SessionPolicy,
        context: Context,
        seat: Seat,
        *,
        sampling: SamplingParams,
        owner: str = "",
        priority: int = 0,
    ) -> None:
        self.policy = policy
        self.sampling = sampling
        self.stop: tuple[str, ...] = ()  # texts at which answers end that a trigger starts
        self.changed: list[Callable[[SessionPolicy], None]] = []
        self.host = host
        self.context = context
        self.seat = seat
        self.ages = Ages(host.metrics)
        self.known: Frame | None = None  # the newest frame that the context stands for
        self.owner = owner
        self.priority = priority
        self.writing = asyncio.Lock()  # of the context
        self._window = Window(policy, host.limits)
        self._warming = asyncio.Lock()
        self._warmed: tuple[Trunk, int, int] | None = None  # a trunk's version that a life of the engine has
        self._began: float | None = None  # when the first frame was captured
        self._said: np.ndarray | None = None  # each cell as the context shows it last (``pruning.Pruned``)
        self._fates: Counter[Fate] = Counter()
        self._drops = self._rebases = self._carried = self._not_warmed = self._pruned = 0
        self._listeners = Listeners()
        self._tasks: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()  # of triggered answers, each to its end
        self._closed = False
        self._triggered = 0
        self._watcher = Watcher(
            host,
            seat,
            policy,
            show=self._show,
            warm=self._warm,
            ended=self._ended,
            same=self._same,
            max_bytes=host.max_frame_bytes,
        )
        self._answers = Answers(self)
        self._triggers = Triggers(policy, self._fire)
        self._spawn(self._watch())

    # ------------------------------------------------------------ frames

    def put(self, frame: Frame) -> None:
        """Leave a frame; never waits. Any thread may. Every frame ends in one ``FrameAck``."""
        self._watcher.put(frame)

    def drop(self, reason: Fate, seq: int, captured: float, count: int = 1) -> None:
        """``count`` frames ended before they came here, the newest of them ``seq``, captured then. What is
        ``unchanged`` has the context known to hold at that time still."""
        frame = Frame(seq=seq, captured=captured, received=captured)
        if reason == "unchanged":
            self._same(frame)
        self._ended(frame, reason, count)

    async def settled(self, seconds: float | None = None) -> None:
        """Return when the frames that are here have been judged, and shown if they are new; with a limit."""
        waited = SETTLE_S if self.known is not None else FIRST_S
        await self._watcher.settled(waited if seconds is None else min(seconds, waited))

    # ------------------------------------------------------------ questions

    async def ask(
        self,
        parts: str | Sequence[TextPart | ImagePart] = (),
        *,
        sampling: SamplingParams | None = None,
        stop: tuple[str, ...] = (),
        remember: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        deadline_ms: float | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """The answer to a question about what is seen now, in pieces; closing it aborts it.

        Without ``parts`` what was told last is answered. Unless ``remember`` is off, question and answer
        enter the context as ``policy.memory`` says. A newer question ends it with a piece ``cut``, ``cancel``
        with one ``cancelled``. MMServeError where it is refused or fails; DeadlineExceeded beyond
        ``deadline_ms``, the policy's if none is given.
        """
        asked = Asked(
            parts=(TextPart(parts),) if isinstance(parts, str) else tuple(parts),
            sampling=sampling or self.sampling,
            stop=stop,
            remember=remember,
            template_kwargs=dict(template_kwargs or {}),
            request_id=request_id or uuid.uuid4().hex,
            deadline_ms=deadline_ms,
        )
        async with aclosing(self._answers.to(asked)) as pieces:
            async for piece in pieces:
                yield piece

    def cancel(self) -> bool:
        """End the answers under way and those that wait, within a step; whether there were any."""
        return self._answers.end_all("cancelled")

    async def tell(self, message: Message, name: str | None = None) -> None:
        """Put a turn of the role user, assistant or tool into the context; nothing is answered.

        ``name`` is what ``forget`` knows it by. InvalidRequest for another role or a clip.
        """
        role, parts = told(message)
        media = await self.seen(parts)
        async with self.writing:
            self.context.tell(role, parts, media, name)
            await self._fit()
        self._spawn(self._warm())

    async def forget(self, name: str) -> bool:
        """Take what was told as ``name`` out of the context; whether it was there."""
        async with self.writing:
            order = self.context.forget(name)
            await self._carry(order)
        return order is not None

    async def update(
        self,
        policy: SessionPolicy | None = None,
        instructions: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        stop: tuple[str, ...] | None = None,
    ) -> None:
        """Change what is given, from now on. New instructions or ``template_kwargs`` (tools among them) have
        the whole context computed anew. ``sampling`` is that of answers which bring none of their own, and
        ``stop`` what ends those that a trigger starts."""
        self.sampling = sampling or self.sampling
        self.stop = self.stop if stop is None else stop
        if instructions is not None or template_kwargs is not None:
            async with self.writing:
                old, self.context = self.context, self.context.rewritten(instructions, template_kwargs)
                self._said = None
                await self._retire(old)
                await self._fit()
            self._spawn(self._warm())
        if policy is not None and policy != self.policy:
            self._take_policy(policy)
            async with self.writing:
                await self._fit()

    # ------------------------------------------------------------ what is told

    def events(self, limit: int = 256) -> AsyncIterator[Event]:
        """What happens from now on, up to ``Closed``. Each call has its own queue of ``limit`` events; a
        listener that falls behind misses the oldest."""
        return self._listeners.listen(limit)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def context_tokens(self) -> int:
        return len(self.context.trunk)

    @property
    def kept_bytes(self) -> int:
        """Memory for frames whose pixels may be asked for again."""
        return self.context.trunk.source_bytes

    def age_ms(self, frame: Frame | None) -> float | None:
        return None if frame is None else 1000 * (time.monotonic() - frame.captured)

    def stats(self) -> dict[str, Any]:
        """Counts and gauges: frames by fate, the context's size, ages (of recent frames, in ms, by stage)."""
        trunk = self.context.trunk
        return {
            "frames": {fate: self._fates[fate] for fate in FATES},
            "context_tokens": len(trunk),
            "context_frames": trunk.frames,
            "next_position": trunk.next_position,
            "drops": self._drops,
            "rebases": self._rebases,
            "carried_tokens": self._carried,
            "not_computed_ahead": self._not_warmed,
            "kept_bytes": trunk.source_bytes,
            "pruned_tokens": self._pruned,
            "answers": self._answers.stats(),
            "fps": self.seat.fps,
            "max_pixels": self._max_pixels,
            "ages_ms": self.ages.stats(),
        }

    async def close(self, reason: str = "closed") -> None:
        """End what is under way and forget everything; what was said until then is told before ``Closed``.
        Twice is once."""
        if self._closed:
            return
        self._closed = True
        self._triggers.stop()
        self._answers.end_all("cancelled")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._answers.gone()
        await asyncio.gather(*self._telling, return_exceptions=True)
        self._watcher.close()
        self.seat.leave()
        self.host.left(self)
        await self._retire(self.context)
        self._listeners.tell(Closed(reason=reason))

    # ------------------------------------------------------------ watching

    async def _watch(self) -> None:
        await self._warm()
        try:
            await self._watcher.run()
        except Exception as error:
            log.exception("a live session ended with an error")
            await self.close(f"a fault: {type(error).__name__}")

    async def _show(self, frames: tuple[Frame, ...], times: Times, cause: Cause) -> Fate:
        try:
            part = self._part(frames)
            while not await self._take_in(part, times):
                pass
        except MMServeError as error:
            self._said = None
            return fate_of(error)
        self.known = frames[-1]
        self.seat.kept()
        self._triggers.shown(cause)
        return "kept"

    async def _take_in(self, part: VideoPart, times: Times) -> bool:
        """See ``part`` and show it. Nothing is done, and it is to be asked again, where it was pruned against
        what has left the context meanwhile."""
        assert part.timestamps is not None
        at = part.timestamps[-1]
        whole = self._window.wants_key(self.context.trunk.segments, at)
        said = None if whole else self._said
        medium = await self.host.see(replace(part, reference=said))
        times.decoded = time.monotonic()
        async with self.writing:
            if medium.kept and said is not self._said:
                return False
            self._said = medium.reference
            self._pruned += medium.seen.dropped_tokens
            self.context.add_frame(_again(part, medium), medium, at)
            await self._fit()
        return True

    def _part(self, frames: tuple[Frame, ...]) -> VideoPart:
        """The clip of one item that ``frames`` are."""
        if self._began is None:
            self._began = frames[0].captured
        times: list[float] = []
        for frame in frames:
            at = max(0.0, frame.captured - self._began)
            times.append(at if not times else max(at, times[-1] + 0.001))
        limits: dict[str, Any] = {
            "timestamps": tuple(times),
            "max_pixels": self._max_pixels,
            "video_pruning_rate": self.policy.pruning_rate,
        }
        if all(frame.data is not None for frame in frames):
            return VideoPart(pictures=tuple(f.data for f in frames if f.data is not None), **limits)
        pixels = [frame.pixels for frame in frames if frame.pixels is not None]
        if len(pixels) < len(frames) or len({p.shape for p in pixels}) > 1:
            raise MediaError("frames of different kinds or sizes do not go together")
        return VideoPart(frames=pixels[0][None] if len(pixels) == 1 else np.stack(pixels), **limits)

    @property
    def _max_pixels(self) -> int:
        return self.seat.max_pixels

    def _same(self, frame: Frame) -> None:
        """``frame`` shows what the context's newest does."""
        if self.known is not None and frame.captured > self.known.captured:
            self.known = replace(frame, data=None, pixels=None, luma=None)
        since = self._watcher.gate.still_since
        self._triggers.same(0.0 if since is None else frame.captured - since)

    def _ended(self, frame: Frame, fate: Fate, count: int = 1) -> None:
        self._fates[fate] += count
        self.host.metrics.live_frames(fate, count)
        age = self.age_ms(frame)
        assert age is not None
        self._listeners.tell(FrameAck(seq=frame.seq, kept=fate == "kept", reason=fate, age_ms=age))

    # ------------------------------------------------------------ the engine

    async def _warm(self, times: Times | None = None) -> None:
        """Have the engine compute the context as it stands, if need be; ``times`` are of its newest frame."""
        if not self.host.watches_ahead:
            return
        async with self._warming:
            trunk = self.context.trunk
            state, last = (trunk, trunk.version, self.host.lives), trunk.segments[-1].number
            if state != self._warmed:
                timings = await self._computed(
                    trunk.request(self._new_id(), **self._manner()), trunk.sources()
                )
                trunk.forget_pixels(last)
                self._warmed = state if timings is not None else None
                if timings is not None and times is not None:
                    times.encoded, times.prefilled = timings.encoded, timings.finished
        if times is not None:
            self.ages.frame(times)

    async def _computed(self, request: PreparedRequest, sources: Sequence[Source]) -> Timings | None:
        """When the engine did what; None where it could not: the next frame or question makes up for it."""
        digests = [item.digest for item in request.items if item.pixels is not None]
        timings: Timings | None = None
        try:
            with self.seat.work("frame"):
                async with aclosing(self.host.answer(request, self.pixels_again(sources))) as saying:
                    del request
                    async for said in saying:
                        timings = said.timings or (said.piece and said.piece.timings) or timings
                        if said.piece is not None and said.piece.error is not None:
                            raise MMServeError(said.piece.error)
        except EngineDead as error:
            self._spawn(self.close(error.message))
            return None
        except MMServeError as error:
            log.debug("a live context could not be computed ahead: %s", error.message)
            self._not_warmed += 1
            await asyncio.sleep(RETRY_S)
            return None
        self.host.encoded(digests)
        return timings or Timings(time.monotonic())

    def pixels_again(self, sources: Sequence[Source]) -> PixelsAgain:
        """How the engine gets pixels of ``sources`` once more: of those that show the wanted alone."""

        async def pixels(wanted: frozenset[bytes]) -> dict[bytes, np.ndarray]:
            showing = [source for source in sources if not wanted.isdisjoint(source.digests)]
            found = await self.host.pixels_of([s.part for s in showing if s.part is not None])
            for source in showing:
                found.update(zip(source.digests, source.pixels or (), strict=False))
            return found

        return pixels

    async def seen(self, parts: Sequence[Part]) -> list[tuple[MediaPart, Medium]]:
        """The pictures among ``parts``, seen."""
        return [(part, await self.host.see(part)) for part in images(parts)]

    async def remembered(self, change: Callable[[Context], None]) -> None:
        """``change`` the context, and have it computed."""
        async with self.writing:
            change(self.context)
            await self._fit()
        if not self._closed:
            self._spawn(self._warm())

    async def _fit(self) -> None:
        """Forget what is beyond the window. ``writing`` is held."""
        order = self.context.fit(self._window)
        if self._said is not None and not self.context.sees_whole:
            self._said = None
            self._watcher.gate.forget()  # the next frame is taken, and is whole
        await self._carry(order)

    async def _carry(self, order: CarryOver | None) -> None:
        if order is None:
            return
        self._drops += 1
        self._rebases += order.shift > 0
        try:
            self._carried += await self.host.carry_over(order)
        except MMServeError as error:  # it is computed again
            log.warning("what a live session keeps could not be carried over: %s", error.message)

    async def _retire(self, context: Context) -> None:
        """Nobody will ask for what was computed of ``context``, as far as it was its own."""
        trunk = context.trunk
        if trunk.epoch and trunk.salt is not None:
            order = CarryOver(
                keys=trunk.keys, kept=(), salt=trunk.salt, new_salt=f"{trunk.salt}.", retire=True
            )
            with suppress(MMServeError):
                await self.host.carry_over(order)

    def _manner(self) -> dict[str, Any]:
        return {"owner": self.owner, "priority": self.priority}

    def _new_id(self) -> str:
        return f"live-{uuid.uuid4().hex}"

    # ------------------------------------------------------------ triggers

    def _fire(self, cause: TriggerCause) -> None:
        if not self._closed and self._answers.may_trigger(cause):
            self._triggered += 1
            self._spawn(self._answer_itself(self._triggered, cause), self._telling)

    async def _answer_itself(self, number: int, cause: TriggerCause) -> None:
        if self._closed:
            return
        question = self.policy.question or ""
        asked = Asked(
            parts=(TextPart(question),),
            sampling=self.sampling,
            stop=self.stop,
            request_id=self._new_id(),
            triggered=True,
        )
        self._listeners.tell(Triggered(answer=number, cause=cause))
        try:
            async with aclosing(self._answers.to(asked)) as pieces:
                async for piece in pieces:
                    self._listeners.tell(Spoken(answer=number, piece=piece))
        except MMServeError as error:
            self._listeners.tell(Failed(answer=number, error=error.body()["error"]))

    # ------------------------------------------------------------ bits

    def _take_policy(self, policy: SessionPolicy) -> None:
        self._said = None
        self.policy = self.seat.policy = policy
        self._watcher.policy = self._watcher.gate.policy = policy
        self._window = Window(policy, self.host.limits)
        self._triggers.stop()
        self._triggers = Triggers(policy, self._fire)
        for told_of in self.changed:
            told_of(policy)

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]] | None = None) -> None:
        """Do ``work`` beside all else. ``close`` cancels it, unless it stands among other ``tasks``."""
        tasks = self._tasks if tasks is None else tasks
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _again(part: VideoPart, medium: Medium) -> VideoPart:
    """``part`` as it gives the same items again, whatever it was pruned against."""
    return replace(part, video_pruning_rate=0.0, kept=medium.kept_of(0))
