"""A live session without an engine: what it asks for is written down, and answered as the test says."""

import asyncio
import time

import numpy as np
from helpers.media_files import picture_file

from mmserve.answer import Said
from mmserve.core.config import MediaOptions
from mmserve.core.messages import SamplingParams, TextOutput, Timings, Usage
from mmserve.core.metrics import Metrics
from mmserve.live.admission import Capacity
from mmserve.live.context import Context
from mmserve.live.frame import Frame
from mmserve.live.policy import SessionPolicy
from mmserve.live.session import LiveSession
from mmserve.live.window import Limits
from mmserve.preprocess.processor import Processor


def scene(place=0, size=(96, 96)):
    """A black square on grey at one of nine places, uint8 [H, W, 3]."""
    pixels = np.full((*size, 3), 128, np.uint8)
    side = size[0] // 3
    row, column = divmod(place % 9, 3)
    pixels[row * side : (row + 1) * side, column * side : (column + 1) * side] = 0
    return pixels


def frame(place=0, seq=0, age=0.0, kind="PNG", **fields):
    """A frame that was captured ``age`` seconds ago."""
    now = time.monotonic()
    data = fields.pop("data", None) or picture_file(scene(place), kind)
    return Frame(seq=seq, data=data, captured=now - age, received=now, **fields)


class FakeHost:
    """``warms`` and ``asked`` are the requests, ``orders`` what was to be carried over.

    Each answer says ``words`` one by one, every ``pace_s``; a warm request takes ``warm_s``. What stands in
    ``fault`` is raised in place of an answer.
    """

    def __init__(self, spec, *, limits=None, options=None):
        self.processor = Processor(spec, options or MediaOptions())
        self.writer = self.processor.writer
        self.metrics = Metrics(lambda: {})
        self.capacity = Capacity()
        self.limits = limits or Limits(tokens=4096, positions=4096)
        self.context_tokens = 8192
        self.max_position = 8192
        self.watches_ahead = True
        self.lives = 1
        self.max_frame_bytes = 1 << 20
        self.words = ["it ", "is ", "black"]
        self.pace_s = self.warm_s = 0.0
        self.fault = None
        self.warms, self.asked, self.orders, self.glances, self.aborted = [], [], [], 0, []
        self.seen = 0
        self.again = []  # how many parts were decoded once more, each time
        self.running = 0

    def open(self, instructions=None, sampling=None, **policy):
        policy = SessionPolicy(**{"fps": 50.0, **policy})
        return LiveSession(
            self,
            policy,
            Context(self.writer, instructions),
            self.capacity.admit(policy),
            sampling=sampling or SamplingParams(max_tokens=16),
        )

    async def glance(self, data, request):
        self.glances += 1
        return await asyncio.to_thread(self.processor.glance, data)

    async def see(self, part):
        self.seen += 1
        return await asyncio.to_thread(self.processor.see, part)

    async def pixels_of(self, parts):
        parts = list(parts)
        self.again.append(len(parts))
        media = [self.processor.see(part) for part in parts]
        return {d: p for m in media for d, p in zip(m.digests, m.pixels, strict=True)}

    def encoded(self, digests):
        pass

    async def carry_over(self, order):
        self.orders.append(order)
        return sum(b - a for a, b in order.kept)

    def left(self, session):
        pass

    async def answer(self, request, pixels):
        (self.warms if request.warm else self.asked).append(request)
        timings = Timings(time.monotonic())
        self.running += 1
        ended = False
        try:
            if self.fault is not None:
                raise self.fault
            if request.warm:
                await asyncio.sleep(self.warm_s)
                yield Said(0, timings.ended(), _piece(request, "", "stop", timings.ended()))
                ended = True
                return
            for word in self.words:
                await asyncio.sleep(self.pace_s)
                yield Said(1, timings, _piece(request, word, None, timings, (len(word),)))
            yield Said(0, timings, _piece(request, "", "stop", timings))
            ended = True
        finally:
            self.running -= 1
            if not ended:
                self.aborted.append(request.request_id)


def _piece(request, text, end, timings, ids=()):
    usage = Usage(prompt_tokens=request.num_tokens)
    return TextOutput(
        request_id=request.request_id,
        text=text,
        token_ids=ids,
        finish_reason=end,
        usage=usage,
        timings=timings,
    )


async def until(condition, seconds=10.0):
    """Wait until ``condition()``; AssertionError if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.005)


async def said(pieces):
    """All pieces, and the text they make."""
    found = [piece async for piece in pieces]
    return found, "".join(piece.text for piece in found)
