"""Answers as they come, taken apart into thoughts, words and calls of tools."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import Struct
from msgspec.structs import replace

from mmserve.core.messages import ChatInput, TextOutput
from mmserve.generation import Generator, speaking
from mmserve.parsing.combined import AnswerParser
from mmserve.parsing.events import CallEnd, Event, joined
from mmserve.parsing.toolbox import Toolbox

NO_TOOLS = Toolbox()


class Piece(Struct):
    """What a piece of text made certain. ``output`` has its counts, its log-probabilities and the end."""

    events: list[Event]
    output: TextOutput


async def parsed(
    service: Generator, chat: ChatInput, tools: Toolbox = NO_TOOLS
) -> AsyncGenerator[Piece, None]:
    """The answer to ``chat``; the last piece alone has a ``finish_reason``.

    If calls may not be parallel the answer ends with the first whole one, and the rest is not generated.
    """
    parser: AnswerParser | None = None
    async with aclosing(speaking(service, chat)) as outputs:
        async for output in outputs:
            parser = parser or AnswerParser(output.start, tools.schemas)
            piece = _piece(parser, output, single=not tools.parallel)
            yield piece
            if piece.output.finish_reason and not output.finish_reason:
                return


def _piece(parser: AnswerParser, output: TextOutput, single: bool) -> Piece:
    events = parser.feed(output.text)
    if output.finish_reason:
        events += parser.finish()
    if single and parser.calls:
        timings = output.timings and output.timings.ended()
        ended = replace(output, finish_reason="stop", timings=timings)
        return Piece(joined(up_to_first_call(events)), ended)
    return Piece(joined(events), output)


def up_to_first_call(events: list[Event]) -> list[Event]:
    """``events`` up to the end of the first whole call, which is among them."""
    return events[: next(i for i, event in enumerate(events) if isinstance(event, CallEnd)) + 1]
