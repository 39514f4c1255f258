"""The answers of one session: one at a time, cut by the next question or finished before it."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from mmserve.core.errors import ContextLengthExceeded, DeadlineExceeded, EngineDead, MMServeError
from mmserve.core.messages import ImagePart, PreparedRequest, SamplingParams, TextOutput, TextPart, Usage
from mmserve.core.thinking import CLOSE, Start
from mmserve.generation import checked
from mmserve.live.context import Question, sources_of, vision_tokens
from mmserve.live.events import End, Piece, TriggerCause
from mmserve.live.frame import Frame
from mmserve.preprocess.bad_words import spelled
from mmserve.preprocess.prompt import thinking_of

if TYPE_CHECKING:
    from mmserve.live.session import LiveSession

log = logging.getLogger(__name__)


class Asked(Struct, frozen=True, kw_only=True):
    """A question, by somebody or by a trigger."""

    parts: tuple[TextPart | ImagePart, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    remember: bool = True
    template_kwargs: dict[str, Any] = {}
    request_id: str
    deadline_ms: float | None = None
    triggered: bool = False


class Run:
    """One answer under way, or waiting for its turn. ``end`` is why it is being ended before its own end."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.end: End | None = None
        self.task: asyncio.Task[None] | None = None
        self.entered = False  # its task runs: one that is cancelled before that would end without a word
        self.begun = False
        self.said_all = False
        self.pieces: asyncio.Queue[Piece | MMServeError] = asyncio.Queue()
        self.newest: Frame | None = None  # that the answer knows of
        self.question: Question | None = None
        self.ids: list[int] = []
        self.text: list[str] = []

    def stop(self, end: End) -> None:
        if self.task is not None and self.end is None and not self.said_all:
            self.end = end
            if self.entered:
                self.task.cancel()

    def enter(self) -> None:
        """At the beginning of its task. CancelledError if it was stopped before."""
        self.entered = True
        if self.end is not None:
            raise asyncio.CancelledError


class Answers:
    """A task for each, so that one can be ended though nobody reads it at that moment."""

    def __init__(self, session: "LiveSession") -> None:
        self._session = session
        self._runs: list[Run] = []
        self._turn = asyncio.Lock()
        self._outcomes: Counter[str] = Counter()

    def to(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """The answer in pieces. See ``LiveSession.ask``."""
        return self._pieces(asked)

    def end_all(self, end: End) -> bool:
        """End every run with a piece that says ``end``; whether there were any."""
        runs = [run for run in self._runs if run.end is None and not run.said_all]
        for run in runs:
            run.stop(end)
        return bool(runs)

    def may_trigger(self, cause: TriggerCause) -> bool:
        """Whether a trigger has anything to do: an answer that waits already will know of it."""
        triggered = [run for run in self._runs if run.asked.triggered]
        if cause == "every" and self._session.policy.on_new_question == "finish":
            return not triggered
        return all(run.begun for run in triggered)

    async def gone(self) -> None:
        """Return when no run is left."""
        tasks = [run.task for run in self._runs if run.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def stats(self) -> dict[str, int]:
        return {"running": len(self._runs), **self._outcomes}

    # ------------------------------------------------------------ one answer

    async def _pieces(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        if self._session.closed:
            raise EngineDead("the live session is closed", code="session_closed")
        run = Run(asked)
        if self._session.policy.on_new_question == "cut":
            self._cut_for(asked)
        self._runs.append(run)
        run.task = asyncio.create_task(self._run(run))
        try:
            while True:
                piece = await run.pieces.get()
                if isinstance(piece, MMServeError):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            run.stop("cancelled")
            await asyncio.wait([run.task])

    def _cut_for(self, asked: Asked) -> None:
        """A newer question ends older answers; one that is triggered, only triggered ones."""
        for run in self._runs:
            if run.asked.triggered or not asked.triggered:
                run.stop("cut")

    async def _run(self, run: Run) -> None:
        """From the wait for its turn to its last piece."""
        deadline_ms = run.asked.deadline_ms or self._session.policy.deadline_ms
        seconds = None if deadline_ms is None else deadline_ms / 1000
        due = None if seconds is None else time.monotonic() + seconds
        outcome = "error"
        try:
            run.enter()
            async with asyncio.timeout(seconds), self._turn:
                run.begun = True
                try:
                    await self._speak(run, due)
                finally:
                    await self._remember(run)
            outcome = "stop"
        except asyncio.CancelledError:
            outcome = run.end or "cancelled"
            run.pieces.put_nowait(self._piece(run, None, run.end or "cancelled"))
        except TimeoutError:
            outcome = "deadline"
            said = f"the answer took longer than deadline_ms ({deadline_ms:g}) allows"
            run.pieces.put_nowait(DeadlineExceeded(said, param="deadline_ms"))
        except MMServeError as error:
            outcome = "deadline" if isinstance(error, DeadlineExceeded) else "error"
            run.pieces.put_nowait(error)
        except Exception as error:
            log.exception("an answer of a live session failed")
            run.pieces.put_nowait(MMServeError(f"the answer failed: {type(error).__name__}"))
        finally:
            self._runs.remove(run)
            self._outcomes[outcome] += 1
            self._session.host.metrics.live_answer(outcome)

    async def _speak(self, run: Run, due: float | None) -> None:
        session = self._session
        media = await session.seen(run.asked.parts)
        await session.settled()
        async with session.writing:
            if run.asked.remember:
                session.context.close_turn()
            question = session.context.question(run.asked.parts, media, run.asked.template_kwargs)
            trunk = session.context.trunk
            run.question, run.newest = question, session.known
            request = self._request(run, question, due)
            pixels = session.pixels_again(sources_of(question, trunk))
        with session.host.metrics.request() as watch, session.seat.work("answer"):
            seen = vision_tokens(request.items)
            async with aclosing(session.host.answer(request, pixels)) as saying:
                del request
                async for said in saying:
                    if said.tokens:
                        if run.newest is not None and not run.ids and not run.text:
                            session.ages.note("first_token", time.monotonic() - run.newest.captured)
                        watch.tokens(said.timings)
                    if said.piece is not None:
                        output = _complete(said.piece, seen, question.start)
                        watch.said(output)
                        self._say(run, checked(output, run.asked.sampling.grammar))

    def _say(self, run: Run, output: TextOutput) -> None:
        run.ids += output.token_ids
        run.text.append(output.text)
        end = output.finish_reason
        run.said_all = end is not None
        run.pieces.put_nowait(self._piece(run, output, end if end in ("stop", "length") else None))

    def _piece(self, run: Run, output: TextOutput | None, end: End | None) -> Piece:
        newest = run.newest
        return Piece(
            text=output.text if output else "",
            age_ms=self._session.age_ms(newest),
            frame_seq=None if newest is None else newest.seq,
            finish_reason=end,
            usage=output.usage if output else Usage(),
            start=run.question.start if run.question else Start.OUTSIDE,
            output=output,
        )

    def _request(self, run: Run, question: Question, due: float | None) -> PreparedRequest:
        session, asked = self._session, run.asked
        trunk, writer = session.context.trunk, session.context.writer
        room = min(
            session.host.context_tokens - len(trunk) - len(question.stretch),
            session.host.max_position - trunk.next_position - question.stretch.advance,
        )
        wanted = asked.sampling.max_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"the question has {len(question.stretch)} tokens, which leaves no room for an answer behind"
                f" the {len(trunk)} tokens of what was seen and said",
                param="content",
            )
        sampling = replace(asked.sampling, max_tokens=room if wanted is None else min(wanted, room))
        return trunk.request(
            asked.request_id,
            question.stretch,
            sampling=sampling,
            thinking=thinking_of(question.thinking, question.start, sampling),
            stop=asked.stop,
            bad_words=spelled(sampling.bad_words, writer.text),
            deadline=due,
            owner=session.owner,
            priority=session.priority,
        )

    async def _remember(self, run: Run) -> None:
        """What was said enters the context, though the answer may have been cut."""
        session, question = self._session, run.question
        if question is None or not run.asked.remember or session.closed:
            return
        ids = self._said_ids(run)
        if session.policy.memory and ids:
            await session.remembered(lambda context: context.remember(question, ids))
        elif not session.policy.memory:
            await session.remembered(lambda context: None)

    def _said_ids(self, run: Run) -> list[int]:
        """The answer as tokens, without its end and its thoughts."""
        assert run.question is not None
        writer = self._session.context.writer
        text = "".join(run.text)
        thinking = run.question.thinking
        if run.asked.stop or CLOSE in text or (thinking is not None and thinking.inside):
            _, closed, answer = text.rpartition(CLOSE)
            inside = thinking is not None and thinking.inside and not closed
            return [] if inside else writer.text.encode_literal(answer.strip())
        ends = {*writer.spec.eos_ids, *run.asked.sampling.stop_token_ids}
        ids = run.ids
        return ids[:-1] if ids and ids[-1] in ends else list(ids)


def _complete(output: TextOutput, seen: dict[str, int], start: Start) -> TextOutput:
    usage = replace(output.usage, image_tokens=seen["image"], video_tokens=seen["video"])
    return replace(output, usage=usage, start=start)
