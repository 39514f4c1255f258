"""The engine on a thread of its own: commands in by a queue, outputs out by callbacks."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from mmserve.core.errors import EngineDead, InvalidRequest, MMServeError, Overloaded
from mmserve.core.messages import CarryOver, Grammar, PixelsWanted, PreparedRequest, TokenOutput
from mmserve.engine.grammar.base import Matcher
from mmserve.engine.grammar.desk import GrammarDesk

log = logging.getLogger(__name__)

MOST_COMPILING = 256  # requests that wait for their grammars

Pixels = Mapping[bytes, np.ndarray]
Delivery = TokenOutput | PixelsWanted | MMServeError
Deliver = Callable[[Delivery], None]
DeliverCount = Callable[[int | MMServeError], None]


class Steps(Protocol):
    """What the loop needs of ``engine.Engine``."""

    @property
    def has_work(self) -> bool: ...
    @property
    def grammars(self) -> GrammarDesk | None: ...
    def submit(self, prepared: PreparedRequest, matcher: Matcher | None = None) -> None: ...
    def abort(self, request_id: str) -> TokenOutput | None: ...
    def supply(self, request_id: str, pixels: Pixels) -> TokenOutput | None: ...
    def carry_over(self, order: CarryOver) -> Iterator[None]: ...
    def holds(self, digest: bytes) -> bool: ...
    def step(self) -> list[TokenOutput | PixelsWanted]: ...
    def stats(self) -> dict[str, Any]: ...
    def check_integrity(self) -> None: ...


class EngineThread:
    """Runs ``engine`` until ``stop``. Only its thread touches the engine.

    A callback is called on that thread, so it must be quick: with each output of its request, with
    PixelsWanted while it waits for ``supply``, or once with the error that refused it. If the loop breaks,
    every waiting callback gets EngineDead. ``after`` is called on that thread when the callbacks of a step,
    or of the commands before it, have all been called, and once more at the end. ``busy_since`` tells when
    the present turn of the loop began (commands, a step, its callbacks), by ``time.monotonic``; None while
    there is nothing to do.
    """

    def __init__(self, engine: Steps, after: Callable[[], None] = lambda: None) -> None:
        self.dead: EngineDead | None = None
        self.busy_since: float | None = None
        self._engine = engine
        self._after = after
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiters: dict[str, Deliver] = {}
        self._compiling: dict[str, Deliver] = {}  # those whose grammars are being compiled
        self._carrying: deque[tuple[Iterator[None], DeliverCount]] = deque()  # orders, the first under way
        self._gate = threading.Lock()  # orders submissions before or after the engine's end
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.dead is None

    def submit(self, request: PreparedRequest, deliver: Deliver) -> None:
        """Hand ``request`` over; EngineDead if nobody is there to take it."""
        self._command(lambda: self._submit(request, deliver))

    def abort(self, request_id: str, deliver: Deliver) -> None:
        """End the request that was submitted with ``deliver`` before the next step, if it still runs; its
        callback is not called again. Another request of the same id is none of the caller's business."""
        if self.alive:
            self._commands.put(lambda: self._abort(request_id, deliver))

    def supply(self, request_id: str, pixels: Pixels, deliver: Deliver) -> None:
        """The pixels that the request submitted with ``deliver`` waits for, by digest."""
        if self.alive:
            self._commands.put(lambda: self._supply(request_id, pixels, deliver))

    def carry_over(self, order: CarryOver, deliver: DeliverCount) -> None:
        """Carry out ``order`` in turns with steps, after those that came before it, and deliver how many
        tokens are cached then, or the error that refused it, once; EngineDead if nobody is there to take
        it."""
        self._command(lambda: self._carry_over(order, deliver))

    @property
    def here(self) -> bool:
        """Whether the caller stands on the engine's thread."""
        return threading.current_thread() is self._thread

    def call(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the engine's thread before its next step; not at all when it has ended."""
        if self.alive:
            self._commands.put(command)

    def holds(self, digest: bytes) -> bool:
        """Whether the features of a vision item are there at this moment; it may change with any step."""
        return self._engine.holds(digest)

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def stop(self) -> None:
        """Abort what runs and end the thread; later submissions find the engine dead."""
        self._commands.put(self._stop)
        self.join()

    def join(self) -> None:
        """Return when the thread has ended, for whatever reason."""
        self._thread.join()

    # ------------------------------------------------------------ on the engine's thread

    def _main(self) -> None:
        try:
            while not self._stopping:
                self.busy_since = time.monotonic()
                self._receive()
                self._carry_on()
                for output in self._engine.step() if self._engine.has_work else ():
                    self._deliver(output)
                self._after()
        except BaseException as error:
            log.exception("the engine loop ended with an error")
            self._end(EngineDead(f"the engine ended with an error: {type(error).__name__}: {error}"))
        else:
            self._end(EngineDead("the engine was stopped"))
        self._after()

    def _receive(self) -> None:
        """Run all commands that are there; with nothing to do, wait for one."""
        if not self._engine.has_work and not self._carrying:
            self._engine.check_integrity()
            self._rest()()
        while not self._commands.empty():
            self._commands.get()()

    def _rest(self) -> Callable[[], None]:
        """The next command."""
        self.busy_since = None
        command = self._commands.get()
        self.busy_since = time.monotonic()
        return command

    def _submit(self, request: PreparedRequest, deliver: Deliver) -> None:
        grammar = request.sampling.grammar
        if grammar is None:
            self._begin(request, deliver)
            return
        try:
            self._compile(request, grammar, deliver)
        except MMServeError as refusal:
            deliver(refusal)

    def _compile(self, request: PreparedRequest, grammar: Grammar, deliver: Deliver) -> None:
        """Have the grammar compiled beside the loop; the request comes back as a command."""
        desk = self._engine.grammars
        if desk is None:
            raise InvalidRequest("this engine cannot keep answers to a form", param=grammar.param)
        if request.request_id in self._compiling:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if len(self._compiling) >= MOST_COMPILING:
            raise Overloaded(
                f"{MOST_COMPILING} requests wait for their grammars, the most allowed; try later"
            )
        self._compiling[request.request_id] = deliver
        desk.request(
            grammar, lambda done: self._commands.put(lambda: self._compiled(request, grammar, deliver, done))
        )

    def _compiled(
        self, request: PreparedRequest, grammar: Grammar, deliver: Deliver, done: Future[Matcher]
    ) -> None:
        if self._compiling.get(request.request_id) is not deliver:
            return  # it was aborted meanwhile
        del self._compiling[request.request_id]
        try:
            self._begin(request, deliver, done.result().copy())
        except InvalidRequest as refusal:  # one for all who brought this grammar: each gets its own
            deliver(InvalidRequest(refusal.message, param=grammar.param, code=refusal.code))
        except Exception as error:
            log.exception("the grammar of request %s could not be compiled", request.request_id)
            deliver(MMServeError(f"the grammar could not be compiled: {type(error).__name__}: {error}"))

    def _begin(self, request: PreparedRequest, deliver: Deliver, matcher: Matcher | None = None) -> None:
        try:
            self._engine.submit(request, matcher)
        except MMServeError as refusal:
            deliver(refusal)
        except Exception as error:  # the engine takes a request last of all, so nothing of it is inside
            log.exception("request %s could not be taken", request.request_id)
            deliver(MMServeError(f"the engine could not take the request: {type(error).__name__}: {error}"))
        else:
            self._waiters[request.request_id] = deliver

    def _abort(self, request_id: str, deliver: Deliver) -> None:
        if self._compiling.get(request_id) is deliver:
            del self._compiling[request_id]
        elif self._waiters.get(request_id) is deliver:
            del self._waiters[request_id]
            self._engine.abort(request_id)

    def _supply(self, request_id: str, pixels: Pixels, deliver: Deliver) -> None:
        if self._waiters.get(request_id) is deliver:
            output = self._engine.supply(request_id, pixels)
            if output is not None:
                self._deliver(output)

    def _carry_over(self, order: CarryOver, deliver: DeliverCount) -> None:
        self._carrying.append((self._engine.carry_over(order), deliver))

    def _carry_on(self) -> None:
        """One turn of the order under way, if there is one."""
        if not self._carrying:
            return
        turns, deliver = self._carrying[0]
        told: int | MMServeError
        try:
            return next(turns)
        except StopIteration as end:
            told = end.value
        except MMServeError as refusal:
            told = refusal
        except Exception as error:
            log.exception("what a session keeps could not be carried over")
            told = MMServeError(f"nothing could be carried over: {type(error).__name__}: {error}")
        self._carrying.popleft()
        deliver(told)

    def _stop(self) -> None:
        self._stopping = True
        for request_id in list(self._waiters):
            output = self._engine.abort(request_id)
            if output is not None:
                self._deliver(output)

    def _deliver(self, output: TokenOutput | PixelsWanted) -> None:
        waiter = self._waiters.get(output.request_id)
        if isinstance(output, TokenOutput) and output.finish_reason:
            self._waiters.pop(output.request_id, None)
        if waiter is not None:
            waiter(output)

    # ------------------------------------------------------------ the end

    def _command(self, command: Callable[[], None]) -> None:
        with self._gate:
            if self.dead:
                raise EngineDead(self.dead.message)  # a new one: a raised error carries its raiser's frames
            self._commands.put(command)

    def _end(self, reason: EngineDead) -> None:
        """Nobody may wait for an engine that is gone: tell those who do, and those on their way in."""
        with self._gate:
            self.dead = reason
        if self._engine.grammars is not None:
            self._engine.grammars.close()
        self._engine = _Gone(reason, self._engine)
        while not self._commands.empty():
            self._commands.get()()
        for deliver in (*self._waiters.values(), *self._compiling.values()):
            deliver(EngineDead(reason.message))
        for _, deliver_count in self._carrying:
            deliver_count(EngineDead(reason.message))
        self._waiters.clear()
        self._compiling.clear()
        self._carrying.clear()


class _Gone:
    """Stands where the engine was: refuses everything, remembers its last figures."""

    has_work = False
    grammars = None

    def __init__(self, reason: EngineDead, engine: Steps) -> None:
        self._reason = reason
        self._engine = engine

    def submit(self, prepared: PreparedRequest, matcher: Matcher | None = None) -> None:
        raise EngineDead(self._reason.message)

    def abort(self, request_id: str) -> None:
        return None

    def supply(self, request_id: str, pixels: Pixels) -> None:
        return None

    def carry_over(self, order: CarryOver) -> Iterator[None]:
        return iter(())  # nobody takes a turn any more

    def holds(self, digest: bytes) -> bool:
        return False

    def step(self) -> list[TokenOutput | PixelsWanted]:
        return []

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def check_integrity(self) -> None:
        pass
