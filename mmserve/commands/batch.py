"""``mmserve batch``: a file of requests, answered as fast as the machine can.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The same command goes on where an earlier run of it ended, however that was.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve.commands import session
from mmserve.core.config import Config, from_arguments
from mmserve.core.errors import ConfigError

if TYPE_CHECKING:
    from mmserve.batch_files import Answers, Line
    from mmserve.server.offline import Answerer
    from mmserve.server.tokenize import Tokenizing

MOST_AT_ONCE = 128  # more would only wait in memory


def add(commands: Any) -> None:
    parser = commands.add_parser("batch", help="answer a file of requests in OpenAI's batch format")
    parser.add_argument("requests", type=Path, metavar="IN.jsonl", help="requests, one JSON object a line")
    parser.add_argument(
        "answers",
        type=Path,
        metavar="OUT.jsonl",
        help="answers as they finish; if it exists, what stands in it is not asked again",
    )
    parser.add_argument("--concurrency", type=int, metavar="VALUE", help="requests under way at a time")
    session.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if every request has a good answer."""
    config = from_arguments(args).for_whole_answers()
    at_once = concurrency(args.concurrency, config)
    from mmserve.batch_files import Answers, check_apart, check_lines
    from mmserve.server.offline import ENDPOINTS

    check_apart(args.requests, args.answers)
    ids = check_lines(args.requests, ENDPOINTS)
    answers = Answers(args.answers)
    try:
        if ids - answers.done:
            with session.loaded(config) as service:
                asyncio.run(answer_all(service, config, args.requests, answers, len(ids), at_once))
    except KeyboardInterrupt:
        print("mmserve batch: stopped; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        answers.close()
    print(f"{len(answers.done)} answers in {args.answers}, {answers.failed} of them errors", file=sys.stderr)
    return int(answers.failed > 0)


def concurrency(wanted: int | None, config: Config) -> int:
    """How many requests may be under way: never more than the service lets wait."""
    most = min(config.scheduler.max_waiting, config.media.max_preparing)
    if wanted is None:
        return min(2 * config.scheduler.max_running, most, MOST_AT_ONCE)
    if not 1 <= wanted <= most:
        raise ConfigError(
            f"concurrency must be 1 to {most}, the lower of max_waiting and max_preparing, not {wanted}",
            param="concurrency",
        )
    return wanted


async def answer_all(
    service: "Tokenizing", config: Config, requests: Path, answers: "Answers", total: int, at_once: int
) -> None:
    """Answer what has no answer yet, ``at_once`` at a time; all that is finished is in the file."""
    from tqdm import tqdm

    from mmserve.media import together
    from mmserve.server.offline import Answerer

    answerer = Answerer(service, config)
    lines = _unanswered(requests, answers)
    with tqdm(total=total, initial=len(answers.done), unit="request", file=sys.stderr, disable=None) as bar:
        try:
            await together([_work(lines, answerer, answers, bar) for _ in range(at_once)])
        finally:
            await answerer.close()


async def _work(lines: Iterator["Line"], answerer: "Answerer", answers: "Answers", bar: Any) -> None:
    """Take the next line until there is none; all workers share ``lines``."""
    for line in lines:
        answers.add(await answerer.answer(line))
        bar.update()


def _unanswered(requests: Path, answers: "Answers") -> Iterator["Line"]:
    from mmserve.batch_files import read_lines

    done = frozenset(answers.done)
    return (line for line in read_lines(requests) if line.custom_id not in done)
