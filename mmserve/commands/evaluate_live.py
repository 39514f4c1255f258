"""The live part of ``mmserve eval``: what is answered about a camera, with and without a window.

A reel is shown to a live session, frame by frame, and each of its shots asked about; the answer about the
last one is judged. Frames have times of their own, so the figures do not depend on how fast the machine is.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from mmserve.bench import table
from mmserve.commands.evaluate import LONGEST_ANSWER, Result, markdown, print_wrong, report
from mmserve.commands.session import loaded
from mmserve.core.config import from_arguments
from mmserve.core.errors import MMServeError
from mmserve.core.messages import ChatInput, Message, Part, SamplingParams, TextPart, VideoPart
from mmserve.generation import whole
from mmserve.live.desk import LiveDesk
from mmserve.live.events import Closed, Event, FrameAck
from mmserve.live.frame import Frame
from mmserve.live.policy import SessionPolicy
from mmserve.live.session import LiveSession
from mmserve.live.trunk import Trunk
from mmserve.models.tiny.evaluate import judge
from mmserve.models.tiny.example import Example
from mmserve.models.tiny.reel import FPS, KINDS, SIDE, reel
from mmserve.service import Service

AT_ONCE = 4
WHOLE = {"window_items": 4096, "memory": 1024}  # nothing is dropped
ALONE, UNDROPPED, DROPPED, REBASED, RESENT = "alone", "whole window", "dropped", "re-based", "re-sent"
WINDOWS = (ALONE, UNDROPPED, DROPPED, REBASED, RESENT)
RATES = (0.0, 0.5, 0.9)  # of tokens that show what was there before and may be left out
SPENT = ("drops", "rebases", "carried_tokens", "context_frames", "pruned_tokens")
GREEDY = SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER)
Figures = dict[str, list[dict[str, float]]]


class Size(NamedTuple):
    """How many shots are shown; frames that a window has at most, and half as many when it has been dropped,
    which are those of one shot at least; positions of a model in which it is moved back again and again."""

    shots: int
    window: int
    positions: int

    @property
    def part(self) -> dict[str, Any]:
        return {"window_items": self.window, "memory": 1, "retention": 0.5}


STILLS, CLIPS = Size(shots=8, window=4, positions=200), Size(shots=6, window=16, positions=480)
SIZES = {"count": STILLS, "name": STILLS, "motion": CLIPS, "before": CLIPS}


class Said(NamedTuple):
    """What was said, and the tokens of frames that it is about."""

    text: str
    tokens: int


class Watched(NamedTuple):
    """What was said about the last shot; the session's ``stats``; its window, as turns to be sent again."""

    said: Said
    stats: dict[str, Any]
    window: tuple[Message, ...]


def pruned_session(rate: float) -> str:
    return f"session, {rate:g}"


def pruned_clip(rate: float) -> str:
    return f"clip, {rate:g}"


PRUNED = tuple(name(rate) for name in (pruned_session, pruned_clip) for rate in RATES)
TABLES = {
    "what became of the session's window": WINDOWS,
    "the pruning rate, of a session whose window was dropped and of a clip": PRUNED,
}


def run(args: argparse.Namespace) -> int:
    """The command, with the arguments of ``mmserve eval``."""
    with loaded(from_arguments(args).for_whole_answers()) as service:
        start = time.monotonic()
        results, rows = asyncio.run(evaluate(service, args.live, args.seed))
        seconds = time.monotonic() - start
    wrong = [r for r in results if not r.right] if args.wrong else []
    if args.json:
        told = {**report(service.model_name, results, wrong, seconds), "sessions": rows, "seed": args.seed}
        print(json.dumps(told, ensure_ascii=False))
        return 0
    for words, conditions in TABLES.items():
        shown = markdown([r for r in results if r.condition in conditions])
        print(f"Right answers by {words}:\n\n{shown}\n")
    print(
        f"{service.model_name}: {len(results)} answers in {seconds:.1f} s; means of each, when asked last:\n"
    )
    print(table.markdown(rows))
    print_wrong(wrong)
    return 0


async def evaluate(service: Service, count: int, seed: int) -> tuple[list[Result], list[dict[str, Any]]]:
    """``count`` reels of each kind, each in every condition; and means over sessions, a row a condition."""
    gate, figures = asyncio.Semaphore(AT_ONCE), Figures()
    asked = [(kind, seed * 1_000_003 + number) for number in range(count) for kind in KINDS]
    with tqdm(total=len(asked), unit="reel", file=sys.stderr, disable=None) as bar:

        async def one(kind: str, number: int) -> list[Result]:
            async with gate:
                results = await judged(service, kind, number, figures)
            bar.update()
            return results

        results = await asyncio.gather(*(one(*each) for each in asked))
    return [result for several in results for result in several], [_row(*each) for each in figures.items()]


async def judged(service: Service, kind: str, number: int, figures: Figures) -> list[Result]:
    """The question about the last shot of reel ``number`` of its kind, in every condition; what the sessions
    went through is added to ``figures``."""
    desk, size = service.live, SIZES[kind]
    shots = reel(kind, size.shots, number)
    watched = {
        ALONE: await watch(desk, shots[-1:], WHOLE),
        UNDROPPED: await watch(desk, shots, WHOLE),
        DROPPED: await watch(desk, shots, size.part),
        REBASED: await watch(desk.with_positions(size.positions), shots, size.part),
    }
    watched[pruned_session(0)] = watched[DROPPED]
    for rate in RATES[1:]:
        watched[pruned_session(rate)] = await watch(desk, shots, {**size.part, "pruning_rate": rate})
    said = {name: each.said for name, each in watched.items()}
    said[RESENT] = await sent(service, watched[DROPPED].window)
    for rate in RATES:
        said[pruned_clip(rate)] = await sent(service, _clip(shots[-1], rate))
    for name, (_, tokens) in said.items():
        stats = watched[name].stats if name in watched else {}
        spent = {kind: stats[kind] for kind in SPENT if kind in stats}
        figures.setdefault(name, []).append({"tokens": tokens, **spent})
    return [_result(shots[-1], condition, text) for condition, (text, _) in said.items()]


def _clip(shot: Example, rate: float) -> tuple[Message, ...]:
    """The question about ``shot`` as a clip that is sent with it."""
    (turn,) = shot.turns
    clip = VideoPart(frames=shot.frames, fps=shot.fps, video_pruning_rate=rate)
    return (Message("user", (clip, TextPart(turn.question))),)


def _result(shot: Example, condition: str, said: str) -> Result:
    (turn,) = shot.turns
    return Result(turn.task, condition, judge(turn, said), turn.question, turn.answer, said)


def _row(condition: str, asked: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Means; None for what a plain request does not have."""
    means = {
        kind: sum(each[kind] for each in asked) / len(asked) if kind in asked[0] else None
        for kind in ("tokens", *SPENT)
    }
    return {"condition": condition, "asked": len(asked), **means}


# ---------------------------------------------------------------- one session


async def watch(desk: LiveDesk, shots: Sequence[Example], window: Mapping[str, Any]) -> Watched:
    """Show ``shots`` to a session with this ``window`` (fields of its policy), and ask about each."""
    # by its weight a busy machine does not thin out what is shown
    policy = SessionPolicy(
        fps=FPS, max_pixels=SIDE * SIDE, max_frame_age_ms=3_600_000.0, weight=100.0, **window
    )
    session = await desk.open(policy, sampling=GREEDY)
    try:
        camera = _Camera(session, sum(len(shot.frames) for shot in shots))
        told: list[tuple[str, str]] = []
        for shot in shots:
            await camera.show(shot)
            (turn,) = shot.turns
            pieces = [p async for p in session.ask(turn.question, remember=shot is not shots[-1])]
            told.append((turn.question, "".join(piece.text for piece in pieces)))
        said = Said(told[-1][1], pieces[-1].usage.video_tokens)
        return Watched(said, session.stats(), _turns(session.context.trunk, told))
    finally:
        await session.close()


class _Camera:
    """Shows ``count`` frames, ``FPS`` a second by their own times, the last of which is now."""

    def __init__(self, session: LiveSession, count: int) -> None:
        self._session = session
        self._events: AsyncIterator[Event] = session.events()
        self._began = time.monotonic() - count / FPS
        self._shown = 0

    async def show(self, shot: Example) -> None:
        """Each frame when the one before is in the context; the engine computes them one by one."""
        for pixels in shot.frames:
            seq, at = self._shown, self._began + self._shown / FPS
            self._session.put(Frame(seq=seq, pixels=pixels, captured=at, received=at, gated="change"))
            await self._kept(seq)
            self._shown += 1

    async def _kept(self, seq: int) -> None:
        async for event in self._events:
            if isinstance(event, FrameAck) and event.seq == seq and event.kept:
                return
            if isinstance(event, FrameAck | Closed):
                raise MMServeError(f"a frame of the evaluation was not kept: {event.reason}")


# ---------------------------------------------------------------- the same window once more


def _turns(trunk: Trunk, told: Sequence[tuple[str, str]]) -> tuple[Message, ...]:
    """What the trunk holds as a conversation, behind which the last of ``told`` is asked. The exchanges in
    it are the latest of those before that had an answer."""
    *before, (asked, _) = told
    answered = [each for each in before if each[1]]
    exchanges = sum(segment.kind == "exchange" for segment in trunk.segments)
    kept = iter(answered[len(answered) - exchanges :])
    turns: list[Message] = []
    parts: list[Part] = []
    for segment in trunk.segments[1:]:
        parts += [source.part for source in segment.sources if source.part is not None]
        if segment.kind == "exchange":
            question, answer = next(kept)
            turns.append(Message("user", (*parts, TextPart(question))))
            turns.append(Message("assistant", (TextPart(answer),)))
            parts = []
    return (*turns, Message("user", (*parts, TextPart(asked))))


async def sent(service: Service, turns: tuple[Message, ...]) -> Said:
    """What is answered to ``turns`` in a request of its own, of which nothing is cached."""
    name = f"eval-{uuid.uuid4().hex}"
    chat = ChatInput(request_id=name, messages=turns, sampling=GREEDY, cache_salt=name)
    answer = await whole(service, chat)
    return Said(answer.text, answer.usage.video_tokens)
