"""From a camera's frames to those that the model is shown."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np
from msgspec import structs

from mmserve.core.errors import MediaError, MMServeError
from mmserve.live.admission import Seat
from mmserve.live.frame import Cause, Fate, Frame, Times
from mmserve.live.gate import Gate, Verdict
from mmserve.live.mailbox import Mailbox
from mmserve.live.policy import SessionPolicy
from mmserve.preprocess.luma import TOO_BIG, luma_of_pixels

Show = Callable[[tuple[Frame, ...], Times, Cause], Awaitable[Fate]]
Warm = Callable[[Times], Awaitable[None]]
PAIR_SLOTS = 2.0  # times 1/fps that the first frame of a pair waits for the second


class Glancer(Protocol):
    async def glance(self, data: bytes, request: object) -> np.ndarray: ...


class Watcher:
    """Takes the newest frame whenever the last one has been dealt with, and judges it.

        put ─▶ mailbox ─▶ luma ─▶ gate ─┬─▶ drop
                                        ├─▶ hold ─▶ (due, or a question came)
                                        └─▶ show ─▶ context ─▶ warm ─▶ engine

    While it is busy frames supersede each other in the mailbox, so there is never a queue. ``show`` takes one
    frame, or two of a pair, into the context and tells what became of them, and ``warm`` has the engine
    compute them; ``ended`` is told each frame's end, in the event loop, and ``same`` each that shows what was
    shown last. Who waits until all is ``settled`` has what is there judged and shown whatever the rate.
    """

    def __init__(
        self,
        glancer: Glancer,
        seat: Seat,
        policy: SessionPolicy,
        *,
        show: Show,
        warm: Warm,
        ended: Callable[[Frame, Fate], None],
        same: Callable[[Frame], None],
        max_bytes: int,
    ) -> None:
        self.gate = Gate(policy)
        self.mailbox = Mailbox()
        self.policy = policy
        self._glancer = glancer
        self._seat = seat
        self._show_frames = show
        self._warm = warm
        self._ended = ended
        self._same = same
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._orders = itertools.count(1)
        self._newest_order = 0
        self._open: set[int] = set()  # frames whose end is not known, by their order
        self._news = asyncio.Event()  # set for a moment when one ends
        self._resting = False
        self._hurried = False
        self._closed = False
        self._captured = float("-inf")  # of the newest frame that was looked at
        self._looked_at = float("-inf")  # when that was
        self._shown_at = float("-inf")  # when the last one that a gate elsewhere let through was captured
        self._held: tuple[Frame, Verdict, np.ndarray] | None = None
        self._half: tuple[Frame, Cause, float] | None = None  # the first of a pair, and when it goes alone

    # ------------------------------------------------------------ any thread

    def put(self, frame: Frame) -> None:
        frame = structs.replace(frame, order=next(self._orders))
        self._newest_order = max(self._newest_order, frame.order)
        self._open.add(frame.order)
        if self._closed:
            self._end_soon(frame, "closed")
        elif frame.nbytes > self._max_bytes and frame.data is not None:
            self._end_soon(frame, "too_big")
        elif (older := self.mailbox.put(frame)) is not None:
            self._end_soon(older, "rate" if self._resting else "superseded")

    def _end_soon(self, frame: Frame, fate: Fate) -> None:
        if _running_loop() is self._loop:
            self._end(frame, fate)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, frame, fate)

    def _end(self, frame: Frame, fate: Fate) -> None:
        self._open.discard(frame.order)
        self._ended(frame, fate)
        self._news.set()
        self._news.clear()

    # ------------------------------------------------------------ the event loop

    async def settled(self, seconds: float) -> None:
        """Return when what has been put before this call has been judged, and shown if it is new; at the
        latest after ``seconds``."""
        order = self._newest_order
        try:
            async with asyncio.timeout(seconds):
                while self._open and min(self._open) <= order:
                    self._hurried = True
                    self.mailbox.nudge()
                    await self._news.wait()
        except TimeoutError:
            pass

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self.gate.fps = self._seat.fps
            await self._rest()
            frame = await self.mailbox.take(self._patience())
            hurried, self._hurried = self._hurried, False
            if frame is not None:
                await self._consider(frame, hurried)
            await self._let_go(hurried)

    def close(self) -> None:
        """What is here ends as ``closed``, and whatever comes."""
        self._closed = True
        held = self._held[0] if self._held else None
        half = self._half[0] if self._half else None
        self._held = self._half = None
        for frame in (half, held, self.mailbox.empty()):
            if frame is not None:
                self._end(frame, "closed")

    async def _rest(self) -> None:
        """Until a further look is worth while."""
        seconds = self._looked_at + self.gate.interval - time.monotonic()
        if seconds > 0 and not self._hurried:
            self._resting = True
            try:
                await self.mailbox.pause(seconds)
            finally:
                self._resting = False

    def _patience(self) -> float | None:
        """Seconds until something held is due; None if nothing is."""
        due = [self._held[1].until] if self._held else []
        due += [self._half[2]] if self._half else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    # ------------------------------------------------------------ one frame

    async def _consider(self, frame: Frame, hurried: bool) -> None:
        if self._late(frame) or frame.captured < self._captured:
            self._end(frame, "late")
            return
        if frame.gated is not None:
            await self._take_gated(frame, frame.gated, hurried)
            return
        self._looked_at = time.monotonic()
        luma = await self._luma(frame)
        if luma is None:
            return
        self._captured = frame.captured
        verdict = self.gate.look(luma, frame.captured)
        self._release(verdict)
        if verdict.action == "drop":
            self._same(frame)
            self._end(frame, "unchanged")
        elif verdict.action == "hold" and not hurried:
            self._held = (frame, verdict, luma)
        else:
            await self._show(frame, verdict.cause or "change", luma)

    async def _take_gated(self, frame: Frame, cause: Cause, hurried: bool) -> None:
        """A frame that was judged where it was made; only the server's own rate holds it back."""
        self._captured = frame.captured
        due = self._shown_at + 1.0 / self._seat.fps
        held, self._held = self._held, None
        if held is not None:
            self._end(held[0], "rate")
        early = self._seat.slowed > 1.0 and frame.captured < due - 1e-9
        if early and not hurried:
            verdict = Verdict(action="hold", cause=cause, until=due)
            self._held = (frame, verdict, np.empty((0, 0), np.uint8))
        else:
            await self._show(frame, cause, None)

    async def _luma(self, frame: Frame) -> np.ndarray | None:
        """The frame's thumbnail; None where it has ended for want of one."""
        if frame.luma is not None:
            return frame.luma
        try:
            if frame.data is not None:
                return await self._glancer.glance(frame.data, self)
            if frame.pixels is None:
                raise MediaError("the frame has neither data nor pixels")
            return await asyncio.to_thread(luma_of_pixels, frame.pixels)
        except MMServeError as error:
            self._end(frame, fate_of(error))
            return None

    def _release(self, verdict: Verdict) -> None:
        """A newer frame was looked at: it takes the place of the one that was held."""
        if self._held is None:
            return
        frame, before, _ = self._held
        self._held = None
        flash = before.flash and verdict.action == "drop"
        self._end(frame, "unchanged" if flash else "superseded" if before.flash else "rate")

    async def _let_go(self, hurried: bool) -> None:
        """Show what was held, if it is due."""
        now = time.monotonic()
        if self._held is not None and (hurried or now >= self._held[1].until):
            frame, verdict, luma = self._held
            self._held = None
            if self._late(frame):
                self._end(frame, "late")
            else:
                await self._show(frame, verdict.cause or "change", luma if luma.size else None)
        if self._half is not None and (hurried or now >= self._half[2]):
            frame, cause, _ = self._half
            self._half = None
            await self._show_all((frame,), cause)

    async def _show(self, frame: Frame, cause: Cause, luma: np.ndarray | None) -> None:
        self._shown_at = frame.captured
        before = self._half
        if luma is not None:
            self.gate.sent(luma, frame.captured)
        if not self.policy.pair:
            await self._show_all((frame,), cause)
        elif before is None:
            self._half = (frame, cause, time.monotonic() + PAIR_SLOTS / self._seat.fps)
        else:
            self._half = None
            await self._show_all((before[0], frame), before[1])

    async def _show_all(self, frames: tuple[Frame, ...], cause: Cause) -> None:
        newest = frames[-1]
        times = Times(newest.captured, newest.received, gated=time.monotonic())
        fate = await self._show_frames(frames, times, cause)
        if fate != "kept":
            self.gate.forget()
            if len(frames) > 1:  # two that do not go together may go alone
                for frame in frames:
                    await self._show_all((frame,), cause)
                return
        for frame in frames:
            self._end(frame, fate)
        if fate == "kept":
            await self._warm(times)

    def _late(self, frame: Frame) -> bool:
        return time.monotonic() - frame.captured > self.policy.max_frame_age_ms / 1000


def fate_of(error: MMServeError) -> Fate:
    """How a frame ends that could not be seen."""
    if isinstance(error, MediaError):
        return "too_big" if error.code in (TOO_BIG, "media_too_large", "too_much_memory") else "decode_error"
    return "rate"  # the server had no room for it


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
