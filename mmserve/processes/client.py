"""The api's side of the sockets: requests out to the engine, what the detokenizer tells in."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from mmserve.answering import Deliver, Pixels
from mmserve.core.arena import Arena, ArenaFull
from mmserve.core.errors import EngineRestarting, InvalidRequest, MMServeError, Overloaded
from mmserve.core.messages import CarryOver, PreparedRequest
from mmserve.processes import messages
from mmserve.processes.messages import (
    Abort,
    Carried,
    Carry,
    Failed,
    News,
    Slot,
    Speak,
    Submit,
    Supply,
    Text,
    Told,
    ToldEvent,
    Wanted,
)
from mmserve.processes.pixels import Loans

log = logging.getLogger(__name__)

Lend = Callable[[Any], Slot]  # pixels that are about to be sent


class Client:
    """The books of what runs in the engine, and a copy of what can be known of it.

    ``submit``, ``abort``, ``supply``, ``carry_over``, ``holds`` and ``stats`` may be called on any thread,
    all else in ``loop`` only. While no detokenizer and no engine are connected (``refusal`` says why),
    submissions are refused. ``most`` may be under way at once: an engine that hangs, or is at a long step,
    refuses nobody.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, arena: Arena, most: int) -> None:
        self.loans = Loans(arena)
        self.most = most
        self.refusal = "the engine is being started"
        self.open = False
        self._loop = loop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine: zmq.Socket[bytes] | None = None
        self._tickets: dict[Deliver, int] = {}
        self._waiters: dict[int, Deliver] = {}
        self._number = 0
        self._held: set[bytes] = set()
        self._stats: dict[str, Any] = {}
        self._met: asyncio.Event = asyncio.Event()

    # ------------------------------------------------------------ called from any thread

    def submit(self, request: PreparedRequest, deliver: Deliver) -> None:
        """Hand ``request`` over; refusals are delivered."""
        if not self._call(self._submit, request, deliver):
            raise EngineRestarting(self.refusal)

    def abort(self, request_id: str, deliver: Deliver) -> None:
        """End what was submitted with ``deliver``, if it still runs; it is not called again."""
        self._call(self._abort, deliver)

    def supply(self, request_id: str, pixels: Pixels, deliver: Deliver) -> None:
        """The pixels that the request submitted with ``deliver`` waits for, by digest."""
        self._call(self._supply, pixels, deliver)

    def carry_over(self, order: CarryOver, deliver: Deliver) -> None:
        """Have ``order`` carried out; the number of tokens, or what it was refused for, is delivered."""
        if not self._call(self._carry_over, order, deliver):
            raise EngineRestarting(self.refusal)

    def holds(self, digest: bytes) -> bool:
        return digest in self._held

    def stats(self) -> dict[str, Any]:
        return self._stats

    def _call(self, what: Callable[..., None], *args: Any) -> bool:
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:  # the loop was closed, and all who waited have been told
            return False
        return True

    # ------------------------------------------------------------ connections

    def connect(self, path: str) -> None:
        """To a new engine, which listens at ``path``."""
        self._engine = self._socket(zmq.PUSH)
        self._engine.connect(path)

    @contextmanager
    def listening(self, path: str) -> Iterator[None]:
        """Hear what a detokenizer has to tell at ``path``."""
        listener = self._socket(zmq.PULL)
        listener.bind(path)
        fd = int(listener.getsockopt(zmq.FD))
        self._loop.add_reader(fd, self._hear, listener)
        try:
            yield
        finally:
            self._loop.remove_reader(fd)
            listener.close()

    async def meet(self, path: str) -> None:
        """Have the engine speak to the detokenizer at ``path``; return when that was heard by it."""
        self._met.clear()
        self._send(Speak(path))
        await self._met.wait()

    def close(self, refusal: MMServeError) -> None:
        """Whatever runs is lost: tell those who wait, abort it in the engine if that lives on, and refuse who
        comes. The engine keeps the loans until it says otherwise."""
        self.open, self.refusal = False, refusal.message
        for ticket, deliver in self._waiters.items():
            self._send(Abort(ticket))
            deliver(type(refusal)(refusal.message))  # each its own: a raised one carries its raiser's frames
        self._waiters.clear()
        self._tickets.clear()

    def forget_engine(self) -> None:
        """The engine is no more, and reads nothing."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self.loans.keep_only(())
        self._held = set()
        self._stats = dict.fromkeys(self._stats, 0)

    def end(self) -> None:
        self._context.destroy()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)  # what can wait is bounded by the requests that are let in
        return socket

    def _send(self, message: Any) -> None:
        if self._engine is not None:
            self._engine.send(messages.to_bytes(message), zmq.NOBLOCK)

    # ------------------------------------------------------------ out

    def _submit(self, request: PreparedRequest, deliver: Deliver) -> None:
        def submission(ticket: int, lend: Lend) -> Submit:
            slots = tuple(None if i.pixels is None else lend(i.pixels) for i in request.items)
            return Submit(ticket, messages.bare(request), slots)

        self._ask(submission, deliver)

    def _carry_over(self, order: CarryOver, deliver: Deliver) -> None:
        self._ask(lambda ticket, _: Carry(ticket, order), deliver)

    def _ask(self, question: Callable[[int, Lend], Submit | Carry], deliver: Deliver) -> None:
        """Send what is answered under a ticket, a new one; refusals are delivered."""
        if not self.open:
            deliver(EngineRestarting(self.refusal))
            return
        if len(self._waiters) >= self.most:
            deliver(Overloaded(f"{self.most} requests are with the engine, the most it is sent; try later"))
            return
        self._number += 1
        try:
            with self._lending() as lend:
                self._send(question(self._number, lend))
        except MMServeError as error:
            deliver(error)
        else:
            self._waiters[self._number] = deliver
            self._tickets[deliver] = self._number

    def _supply(self, pixels: Pixels, deliver: Deliver) -> None:
        ticket = self._tickets.get(deliver)
        if ticket is None:
            return
        try:
            with self._lending() as lend:
                self._send(Supply(ticket, tuple((digest, lend(own)) for digest, own in pixels.items())))
        except MMServeError as error:
            deliver(error)  # who hears it aborts the request

    def _abort(self, deliver: Deliver) -> None:
        ticket = self._tickets.get(deliver)
        if ticket is not None:
            self._forget(ticket)
            self._send(Abort(ticket))

    @contextmanager
    def _lending(self) -> Iterator[Lend]:
        """Lends pixels that are about to be sent; nothing is lent if they are not. What cannot be sent is an
        error of the request's."""
        lent: list[int] = []

        def lend(pixels: Any) -> Slot:
            slot = self.loans.lend(pixels)
            lent.append(slot.loan)
            return slot

        try:
            yield lend
        except ArenaFull as error:
            self.loans.give_back(lent)
            raise Overloaded(f"the memory for pixels is full ({error}); try later") from None
        except (OverflowError, ValueError) as error:
            self.loans.give_back(lent)
            raise InvalidRequest(f"a value of the request is beyond what can be: {error}") from None
        except Exception as error:
            self.loans.give_back(lent)
            log.exception("a request could not be sent to the engine")
            raise MMServeError(f"the request could not be sent: {type(error).__name__}: {error}") from None

    # ------------------------------------------------------------ in

    def _hear(self, listener: zmq.Socket[bytes]) -> None:
        """All that has come: the descriptor tells only of what is new."""
        while True:
            try:
                told = messages.to_told(listener.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._take(told)

    def _take(self, told: Told) -> None:
        """The news come first, so that whoever has heard an answer finds the figures after it."""
        if told.news is not None:
            self._learn(told.news)
        for event in told.events:
            deliver = self._waiters.get(event.ticket)
            if deliver is not None:
                self._deliver(event, deliver)

    def _deliver(self, event: ToldEvent, deliver: Deliver) -> None:
        match event:
            case Text(said=said):
                if said.last:
                    self._forget(event.ticket)
                deliver(said)
            case Wanted(wanted=wanted):
                deliver(wanted)
            case Failed(fault=fault):
                deliver(fault.error())  # who hears it aborts the request, which may still run
            case Carried(tokens=tokens, fault=fault):
                self._forget(event.ticket)
                deliver(tokens if fault is None else fault.error())

    def _learn(self, news: News) -> None:
        if news.stats is not None:
            self._stats = news.stats
        self.loans.give_back(news.returned)
        if news.held is not None:
            self._held = set(news.held)
        self._held.update(news.came)
        self._held.difference_update(news.went)
        if news.borrowed is not None:
            self.loans.keep_only(news.borrowed)
            self._met.set()

    def _forget(self, ticket: int) -> None:
        self._tickets.pop(self._waiters.pop(ticket), None)
