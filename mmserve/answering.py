"""Who answers prepared requests: the interface before the engine, and its form in one process."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, Protocol

import numpy as np

from mmserve.answer import Answer, Brief, Said
from mmserve.core.errors import MMServeError
from mmserve.core.messages import CarryOver, PixelsWanted, PreparedRequest, TokenOutput
from mmserve.engine.detokenizer import TokenBytes
from mmserve.engine.loop import EngineThread

Pixels = Mapping[bytes, np.ndarray]
# Makes pixels of a request once more: those of the items with these digests, and whatever comes with them.
PixelsAgain = Callable[[frozenset[bytes]], Awaitable[Pixels]]


class AnswerEngine(Protocol):
    """Prepared requests in, pieces of text out. It may be called from any event loop, also from several."""

    @property
    def trouble(self) -> str | None:
        """Why requests are not answered at this moment, in words; None while they are."""

    @property
    def lives(self) -> int:
        """How many times it has been started: what was proved of one life says nothing of the next."""

    @property
    def failed(self) -> Future[str]:
        """Done with the reason when it is dead for good and the server is to end."""

    def answer(self, request: PreparedRequest, pixels: PixelsAgain) -> AsyncGenerator[Said, None]:
        """What is said to ``request``, up to its end; closing it earlier aborts it.

        MMServeError when the request is refused or the engine is lost. ``pixels`` is asked where features
        were dropped that the request relies on.
        """

    async def carry_over(self, order: CarryOver) -> int:
        """Have what a session keeps of its context cached under another salt; how many tokens of it are, from
        the first on. MMServeError when the order is refused or the engine is lost. Cancelled, it may be
        carried out all the same."""

    def holds(self, digest: bytes) -> bool:
        """Whether the features of a vision item are there, as far as is known at this moment."""

    def stats(self) -> dict[str, Any]:
        """The engine's counts and gauges."""

    def stop(self) -> None:
        """Abort what runs and end; later requests find it dead. Twice is once."""


class LocalEngine:
    """The engine on a thread of this process; text is made in the event loop of whoever asks.

    One that dies refuses everything and does not fail the server, which can still be asked why.
    """

    lives = 1

    def __init__(self, thread: EngineThread, tokens: TokenBytes) -> None:
        self.thread = thread
        self.failed: Future[str] = Future()
        self._tokens = tokens

    @property
    def trouble(self) -> str | None:
        return None if self.thread.dead is None else self.thread.dead.message

    async def answer(self, request: PreparedRequest, pixels: PixelsAgain) -> AsyncGenerator[Said, None]:
        answer = Answer(Brief.of(request), self._tokens)
        async with aclosing(conversation(self.thread, request, pixels)) as outputs:
            del request  # the engine alone keeps the pixels, for as long as it needs them
            async for output in outputs:
                said = answer.add(output)
                if said.early:
                    await outputs.aclose()
                yield said

    async def carry_over(self, order: CarryOver) -> int:
        return await carried(self.thread, order)

    def holds(self, digest: bytes) -> bool:
        return self.thread.holds(digest)

    def stats(self) -> dict[str, Any]:
        return {**self.thread.stats(), "process_restarts": 0}

    def stop(self) -> None:
        self.thread.stop()


Deliver = Callable[[Any], None]  # takes a TokenOutput or a Said, PixelsWanted, a count, or an MMServeError


class Listener(Protocol):
    """What takes requests and calls back with what becomes of them, on whatever thread. The callback is what
    a submission is known by, since two may have one id."""

    def submit(self, request: PreparedRequest, deliver: Deliver) -> None: ...
    def abort(self, request_id: str, deliver: Deliver) -> None: ...
    def supply(self, request_id: str, pixels: Pixels, deliver: Deliver) -> None: ...
    def carry_over(self, order: CarryOver, deliver: Deliver) -> None: ...


async def conversation(
    engine: Listener, request: PreparedRequest, pixels: PixelsAgain
) -> AsyncGenerator[Any, None]:
    """What ``engine`` says to ``request``, which is aborted when this is closed before the end."""
    request_id, inbox, ended = request.request_id, Inbox(), False
    engine.submit(request, inbox.deliver)
    del request
    try:
        while not ended:
            delivery = await inbox.next()
            if isinstance(delivery, PixelsWanted):
                engine.supply(request_id, await _these(pixels, delivery.digests), inbox.deliver)
            else:
                ended = _ends(delivery)
                yield delivery
    finally:
        if not ended:
            engine.abort(request_id, inbox.deliver)


async def _these(pixels: PixelsAgain, wanted: frozenset[bytes]) -> Pixels:
    """Those ``wanted`` alone: the engine would keep others in memory for as long as the request runs."""
    made = await pixels(wanted)
    return {digest: made[digest] for digest in wanted if digest in made}


async def carried(engine: Listener, order: CarryOver) -> int:
    """How many tokens are cached when ``engine`` has carried out ``order``."""
    inbox = Inbox()
    engine.carry_over(order, inbox.deliver)
    count: int = await inbox.next()
    return count


def _ends(output: TokenOutput | Said) -> bool:
    """Whether the engine says no more to the request."""
    return output.finish_reason is not None if isinstance(output, TokenOutput) else output.last


class Inbox:
    """Carries deliveries from another thread to the coroutine that waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliveries: asyncio.Queue[Any] = asyncio.Queue()
        self.deliver = self._deliver  # one object, by which the engine knows its submission

    async def next(self) -> Any:
        """The next delivery; raises what was delivered in its place."""
        delivery = await self._deliveries.get()
        if isinstance(delivery, MMServeError):
            raise delivery
        return delivery

    def _deliver(self, delivery: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliveries.put_nowait, delivery)
