"""What a session tells its listeners."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

from msgspec import Struct

from mmserve.core.messages import TextOutput, Usage
from mmserve.core.thinking import Start
from mmserve.live.frame import Fate

End = Literal["stop", "length", "cut", "cancelled"]
TriggerCause = Literal["every", "change", "still"]


class Piece(Struct, frozen=True, kw_only=True):
    """A piece of an answer. The last one alone has a ``finish_reason``: ``cut`` by a newer question, or
    ``cancelled``.

    ``age_ms`` is how long ago the newest frame that the answer could know of was captured, at this moment,
    and ``frame_seq`` its number; both None where no frame was seen. ``output`` is the engine's own piece.
    """

    text: str
    age_ms: float | None = None
    frame_seq: int | None = None
    finish_reason: End | None = None
    usage: Usage = Usage()
    start: Start = Start.OUTSIDE
    output: TextOutput | None = None


class FrameAck(Struct, frozen=True, kw_only=True, tag="frame.ack"):
    """What became of frame ``seq``; ``age_ms`` at this moment."""

    seq: int
    kept: bool
    reason: Fate
    age_ms: float


class Triggered(Struct, frozen=True, kw_only=True, tag="triggered"):
    """The standing question is being answered by itself, as ``answer``, because of ``cause``."""

    answer: int
    cause: TriggerCause


class Spoken(Struct, frozen=True, kw_only=True, tag="spoken"):
    """A piece of the triggered ``answer``."""

    answer: int
    piece: Piece


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The triggered ``answer`` ended with an error, of the OpenAI shape."""

    answer: int
    error: dict[str, Any]


class Closed(Struct, frozen=True, kw_only=True, tag="closed"):
    """The session has ended; the last event."""

    reason: str


Event = FrameAck | Triggered | Spoken | Failed | Closed


class Listeners:
    """Whoever listens, each with a bounded queue of its own. One event loop."""

    def __init__(self) -> None:
        self._queues: dict[int, tuple[deque[Event], asyncio.Event]] = {}
        self._next = 0
        self._last: Closed | None = None

    def tell(self, event: Event) -> None:
        """Put ``event`` into every queue; a full one loses its oldest."""
        if isinstance(event, Closed):
            self._last = event
        for queue, news in self._queues.values():
            queue.append(event)
            news.set()

    def listen(self, limit: int) -> AsyncIterator[Event]:
        """Events from this call on, up to ``Closed``."""
        number, self._next = self._next, self._next + 1
        queue: deque[Event] = deque(() if self._last is None else (self._last,), maxlen=limit)
        news = asyncio.Event()
        news.set()
        self._queues[number] = (queue, news)
        return self._events(number, queue, news)

    async def _events(self, number: int, queue: deque[Event], news: asyncio.Event) -> AsyncIterator[Event]:
        try:
            while True:
                await news.wait()
                while queue:
                    event = queue.popleft()
                    yield event
                    if isinstance(event, Closed):
                        return
                news.clear()
        finally:
            self._queues.pop(number, None)
