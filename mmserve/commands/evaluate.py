"""``mmserve eval``: the bundled evaluation set through the engine, judged by task and condition.

With ``--live`` the questions are about cameras instead (``evaluate_live.py``).
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmserve.commands import session
from mmserve.commands.bench_options import count, count_or_none
from mmserve.core.config import Config, from_arguments
from mmserve.core.errors import ConfigError

if TYPE_CHECKING:
    from mmserve.core.messages import Part
    from mmserve.models.tiny.example import Example, Turn
    from mmserve.service import Service

AT_ONCE = 64
LONGEST_ANSWER = 256
ALL = "all"


class Question(NamedTuple):
    condition: str
    example: "Example"
    turn: "Turn"


class Result(NamedTuple):
    """One judged answer; ``condition`` is clean, bad or photo, or how a camera's frames were remembered."""

    task: str
    condition: str
    right: bool
    question: str
    wanted: str
    said: str


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="run the bundled evaluation set and print a table")
    parser.add_argument("--limit", type=int, metavar="VALUE", help="ask only the first so many questions")
    parser.add_argument(
        "--live",
        type=count,
        metavar="N",
        help="instead: N cameras of each kind, by what became of their sessions' windows",
    )
    parser.add_argument(
        "--seed", type=count_or_none, default=0, metavar="N", help="of what they show (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--wrong", action="store_true", help="also list the wrong answers")
    session.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.live is not None:
        if args.limit is not None:
            raise ConfigError("limit is of the evaluation set; --live says itself how many", param="limit")
        from mmserve.commands import evaluate_live

        return evaluate_live.run(args)
    config = from_arguments(args).for_whole_answers()
    with session.loaded(config) as service:
        start = time.monotonic()
        results = asyncio.run(evaluate(service, questions()[: args.limit], config))
        seconds = time.monotonic() - start
    wrong = [r for r in results if not r.right] if args.wrong else []
    if args.json:
        print(json.dumps(report(service.model_name, results, wrong, seconds), ensure_ascii=False))
    else:
        print(markdown(results))
        print(f"\n{service.model_name}: {len(results)} questions in {seconds:.1f} s")
        print_wrong(wrong)
    return 0


def print_wrong(wrong: Sequence[Result]) -> None:
    print("".join(f"\n{r.task}, {r.condition}: {r.question}\n  - {r.wanted}\n  + {r.said}" for r in wrong))


def questions() -> list[Question]:
    """Every question of the evaluation set, each asked on its own."""
    from mmserve.models.tiny.evalset import read_evalset

    return [
        Question(condition, example, turn) for condition, example in read_evalset() for turn in example.turns
    ]


async def evaluate(service: "Service", asked: Sequence[Question], config: Config) -> list[Result]:
    """Ask everything, AT_ONCE at a time, and judge the answers."""
    from tqdm import tqdm

    gate = asyncio.Semaphore(min(AT_ONCE, config.scheduler.max_waiting))
    with tqdm(total=len(asked), unit="question", file=sys.stderr, disable=None) as bar:

        async def one(question: Question) -> Result:
            async with gate:
                result = await _judged(service, question)
            bar.update()
            return result

        return list(await asyncio.gather(*map(one, asked)))


async def _judged(service: "Service", asked: Question) -> Result:
    from mmserve.core.messages import ChatInput, Message, SamplingParams, TextPart
    from mmserve.generation import whole
    from mmserve.models.tiny.evaluate import judge

    turn = asked.turn
    chat = ChatInput(
        request_id=f"eval-{uuid.uuid4().hex}",
        messages=(Message("user", (picture(asked.example), TextPart(turn.question))),),
        sampling=SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER),
    )
    said = (await whole(service, chat)).text
    return Result(turn.task, asked.condition, judge(turn, said), turn.question, turn.answer, said)


def picture(example: "Example") -> "Part":
    from mmserve.core.messages import ImagePart, VideoPart

    if len(example.frames) == 1:
        return ImagePart(pixels=example.frames[0])
    return VideoPart(frames=example.frames, fps=example.fps)


def tally(results: Sequence[Result]) -> dict[str, dict[str, tuple[int, int]]]:
    """``{task: {condition: (right, asked)}}``, with a last row for all tasks."""
    tasks = [*sorted({r.task for r in results}), ALL]
    conditions = list(dict.fromkeys(r.condition for r in results))
    return {
        task: {
            condition: _share([r for r in results if task in (r.task, ALL) and r.condition == condition])
            for condition in conditions
        }
        for task in tasks
    }


def markdown(results: Sequence[Result]) -> str:
    """The tally as a table: right answers in per cent, and of how many."""
    counts = tally(results)
    conditions = list(counts[ALL])
    lines = ["| task | " + " | ".join(conditions) + " |", "|---|" + "---|" * len(conditions)]
    for task, row in counts.items():
        lines.append(f"| {task} | " + " | ".join(_cell(*row[c]) for c in conditions) + " |")
    return "\n".join(lines)


def report(model: str, results: Sequence[Result], wrong: Sequence[Result], seconds: float) -> dict[str, Any]:
    tasks = {
        task: {condition: {"right": right, "asked": asked} for condition, (right, asked) in row.items()}
        for task, row in tally(results).items()
    }
    return {
        "model": model,
        "seconds": round(seconds, 3),
        "tasks": tasks,
        "wrong": [r._asdict() for r in wrong],
    }


def _share(results: Sequence[Result]) -> tuple[int, int]:
    return sum(r.right for r in results), len(results)


def _cell(right: int, asked: int) -> str:
    return f"{100 * right / asked:.1f} % of {asked}" if asked else "–"
