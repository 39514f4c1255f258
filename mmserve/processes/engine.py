"""The engine process: requests in from the api, what each step said out to the detokenizer.

    python -m mmserve.processes.engine SOCKET_FD ARENA_FD PARENT_PID FOLDER

Four threads: one receives, one runs the engine (``EngineThread``) and sends, one gives signs of life,
one waits for the parent's end.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from mmserve.answer import Brief
from mmserve.core.arena import Window
from mmserve.core.env import prepare_environment
from mmserve.core.errors import EngineDead, MMServeError
from mmserve.core.heap import settle
from mmserve.core.messages import CarryOver, PixelsWanted, PreparedRequest, TokenOutput
from mmserve.core.wire import Fault
from mmserve.engine.loop import Delivery, EngineThread, Steps
from mmserve.loading import load_engine, told_of
from mmserve.logs import set_up_logging, tell_stacks_on_signal
from mmserve.processes import messages
from mmserve.processes.messages import (
    Abort,
    Carried,
    Carry,
    Closed,
    EngineHello,
    Event,
    Failed,
    News,
    NotReady,
    Opened,
    Output,
    Ready,
    Speak,
    Step,
    Submit,
    Supply,
    ToEngine,
    Wanted,
)
from mmserve.processes.parent import Parent
from mmserve.processes.pixels import Borrowed

if TYPE_CHECKING:
    from mmserve.encoders.pool import EmbeddingPool
    from mmserve.engine.engine import Engine

log = logging.getLogger(__name__)

STATS_S = 0.1  # at most so often while nothing ends
FIRST_DECODES = 4  # rows of steps that are captured before anybody asks
LAST_WORDS_MS = 1000  # to send what a dying engine has to say


class Outbox:
    """What one step has to say, gathered and sent as one message. Used on the engine's thread only.

    Memory for what is not sent yet is not bounded here: a detokenizer that has died is replaced, and what
    ran is aborted before.
    """

    def __init__(self, engine: Steps, pool: "EmbeddingPool", borrowed: Borrowed) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine = engine
        self._pool = pool
        self._borrowed = borrowed
        self._socket: zmq.Socket[bytes] | None = None
        self._events: list[Event] = []
        self._ended = False  # something has, since figures were told
        self._told: dict[str, Any] = {}  # the last figures
        self._told_at = 0.0
        self._noted: dict[bytes, bool] = {}  # digests that came or went since the last message
        self._first = False  # nothing was told to this detokenizer yet
        pool.noted = self._noted.__setitem__

    def speak(self, path: str) -> None:
        """To a new detokenizer from now on; what the last one was told may be lost."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.linger = LAST_WORDS_MS
        self._socket.set_hwm(0)
        self._socket.connect(path)
        self._first = True

    def add(self, event: Event, *, ends: bool = False) -> None:
        self._events.append(event)
        self._ended |= ends

    def send(self) -> None:
        """After each step, and after commands without one: all that there is to say, if there is any."""
        news = self._news()
        if self._socket is None or not (self._events or news):
            return
        self._socket.send(messages.to_bytes(Step(self._events, news)))
        self._events = []

    def close(self) -> None:
        """Wait a moment until what was said has left."""
        self._context.destroy()

    def _news(self) -> News | None:
        if self._socket is None:
            return None
        returned, stats = self._borrowed.take_returned(), self._stats()
        came, went = self._changes()
        if self._first:
            self._first = False
            return News(stats, held=self._pool.digests, borrowed=self._borrowed.outstanding)
        if not (stats or returned or came or went):
            return None
        return News(stats, came, went, returned)

    def _stats(self) -> dict[str, Any] | None:
        """The figures if something has ended, if the engine comes to rest, or if they are old; None if they
        are as they were told."""
        now = time.monotonic()
        due = self._first or self._ended or not self._engine.has_work or now >= self._told_at + STATS_S
        if not due:
            return None
        self._ended, self._told_at = False, now
        stats = self._engine.stats()
        if stats == self._told and not self._first:
            return None
        self._told = stats
        return stats

    def _changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        if not self._noted:
            return (), ()
        came = tuple(digest for digest, here in self._noted.items() if here)
        went = tuple(digest for digest, here in self._noted.items() if not here)
        self._noted.clear()
        return came, went


class Asked:
    """One request as the engine's thread calls back for it."""

    def __init__(self, ticket: int, request: PreparedRequest, outbox: Outbox, ended: Callable[[int], None]):
        self.ticket = ticket
        self.request_id = request.request_id
        self._brief: Brief | None = Brief.of(request)
        self._outbox = outbox
        self._ended = ended

    def __call__(self, delivery: Delivery) -> None:
        if isinstance(delivery, TokenOutput):
            self._output(delivery)
        elif isinstance(delivery, PixelsWanted):
            self._outbox.add(Wanted(self.ticket, delivery))
        else:
            self._end(Failed(self.ticket, Fault.of(delivery)))

    def close(self) -> None:
        """It was aborted."""
        self._end(Closed(self.ticket))

    def _output(self, output: TokenOutput) -> None:
        if self._brief is not None:
            self._outbox.add(Opened(self.ticket, self._brief))
            self._brief = None
        if output.finish_reason is None:
            self._outbox.add(Output(self.ticket, output))
        else:
            self._end(Output(self.ticket, output))

    def _end(self, event: Output | Failed | Closed) -> None:
        self._outbox.add(event, ends=True)
        self._ended(self.ticket)


class Desk:
    """Takes what the api sends, on the thread that receives it."""

    def __init__(
        self, thread: EngineThread, outbox: Outbox, borrowed: Borrowed, heard: Callable[[], None]
    ) -> None:
        self._thread = thread
        self._outbox = outbox
        self._borrowed = borrowed
        self._heard = heard  # called when the api is known to be connected
        self._asked: dict[int, Asked] = {}

    def take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Supply(ticket=ticket, slots=slots):
                # Also if the request has ended: what was never borrowed would never be given back.
                pixels = {digest: self._borrowed.array(slot) for digest, slot in slots}
                if asked := self._asked.get(ticket):
                    self._thread.supply(asked.request_id, pixels, asked)
            case Abort(ticket=ticket):
                if asked := self._asked.pop(ticket, None):
                    self._thread.abort(asked.request_id, asked)
                    self._thread.call(asked.close)
            case Carry(ticket=ticket, order=order):
                self._carry_over(ticket, order)
            case Speak(path=path):
                self._heard()
                self._thread.call(lambda: self._outbox.speak(path))

    def _submit(self, message: Submit) -> None:
        pixels = tuple(None if slot is None else self._borrowed.array(slot) for slot in message.slots)
        request = messages.clothed(message.request, pixels)
        asked = self._asked[message.ticket] = Asked(message.ticket, request, self._outbox, self._forget)
        try:
            self._thread.submit(request, asked)
        except EngineDead as dead:
            log.warning("request %s came too late: %s", request.request_id, dead.message)

    def _carry_over(self, ticket: int, order: CarryOver) -> None:
        def tell(told: int | MMServeError) -> None:
            event = Carried(ticket, told) if isinstance(told, int) else Carried(ticket, fault=Fault.of(told))
            self._outbox.add(event, ends=True)

        try:
            self._thread.carry_over(order, tell)
        except EngineDead as dead:
            log.warning("an order to carry over came too late: %s", dead.message)

    def _forget(self, ticket: int) -> None:
        self._asked.pop(ticket, None)


def wake(thread: EngineThread) -> None:
    """Something happened on another thread that is to be told, also if the engine has nothing to do."""
    if not thread.here:
        thread.call(lambda: None)


def receive(socket: zmq.Socket[bytes], desk: Desk) -> None:
    """Take what comes, for ever; an engine that hears nothing any more is of no use."""
    try:
        while True:
            desk.take(messages.to_engine(socket.recv()))
    except BaseException:
        log.exception("the engine process cannot go on receiving")
        os._exit(1)


def rehearse(engine: "Engine") -> None:
    """What the first answers need is made before them (on a GPU it was, when the engine was made), and
    nothing that lives now is looked at again."""
    graphs = engine.runner.graphs
    if engine.device.synchronous:
        graphs.prepare(size for size in graphs.decode_sizes if size <= FIRST_DECODES)
    settle()


def run(engine: "Engine", hello: EngineHello, arena_fd: int, parent: Parent) -> None:
    """Serve until the engine fails; the parent's end ends the process before."""
    window = Window(arena_fd, hello.arena_bytes)
    engine.device.pin(*window.warm)
    borrowed = Borrowed(window, lambda: None)
    outbox = Outbox(engine, engine.stage.pool, borrowed)
    thread = EngineThread(engine, outbox.send)
    thread.call(partial(rehearse, engine))
    borrowed.returned = partial(wake, thread)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = context.socket(zmq.PULL)
    listener.set_hwm(0)
    listener.bind(hello.listen)
    desk = Desk(thread, outbox, borrowed, parent.bind)
    threading.Thread(target=receive, args=(listener, desk), name="receive", daemon=True).start()
    parent.ready(Ready(told_of(engine)), lambda: thread.busy_since)
    thread.join()
    outbox.close()


def main(socket_fd: int, arena_fd: int, parent_pid: int, folder: str) -> None:
    prepare_environment()
    set_up_logging()
    tell_stacks_on_signal()
    parent = Parent(socket_fd, parent_pid, folder)
    hello = parent.hello()
    assert isinstance(hello, EngineHello)
    try:
        engine = load_engine(hello.config, hello.eos_ids, hello.tokenizer_json)
    except MMServeError as error:
        parent.say(NotReady(Fault.of(error)))
    else:
        run(engine, hello, arena_fd, parent)
    os._exit(1)  # at once: threads of libraries may be in the middle of something


if __name__ == "__main__":
    _, socket_fd, arena_fd, parent_pid, folder = sys.argv
    main(int(socket_fd), int(arena_fd), int(parent_pid), folder)
