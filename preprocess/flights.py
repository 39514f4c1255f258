"""Work that several callers wait for and that is done once."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Lost(Exception):
    """The event loop on which the work ran has ended; whoever still waits begins it anew."""


class Flight(Generic[T]):
    """One piece of work under way. It belongs to nobody: it ends with its result, or when all have left."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.waiting = 0
        self.landed: Future[T] = Future()
        self.landed.set_running_or_notify_cancel()  # so that one who leaves cannot cancel it for the others
        self.loop = asyncio.get_running_loop()
        self.task = self.loop.create_task(work)

    def land(self) -> None:
        """The task has ended."""
        if self.task.cancelled():
            self.landed.set_exception(Lost())
        elif (error := self.task.exception()) is not None:
            self.landed.set_exception(error)
        else:
            self.landed.set_result(self.task.result())

    def give_up(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the task ended with it
            self.loop.call_soon_threadsafe(self.task.cancel)


class Flights(Generic[T]):
    """At most one flight a key. It may be used from several event loops at once.

    Nobody but those under way is remembered: a result is for those who waited for it, and so is an error.
    """

    def __init__(self) -> None:
        self.shared = 0  # callers who joined a flight that another had begun
        self._flights: dict[bytes, Flight[T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._flights)

    async def join(self, key: bytes, work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
        """The result of ``work`` and whether another caller had begun it; what it raises all its waiters get.

        The work runs on the loop of the caller who began it, and goes on when that caller leaves as long
        as any other waits.
        """
        while True:
            flight, joined = self._board(key, work)
            try:
                return await asyncio.wrap_future(flight.landed), joined
            except Lost:
                continue
            finally:
                self._leave(key, flight)
                del flight  # an error holds this frame, and the flight the error: no ring may keep both

    def _board(self, key: bytes, work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[Flight[T], bool]:
        with self._lock:
            flight = self._flights.get(key)
            joined = flight is not None
            if flight is None:
                flight = self._begin(key, work())
            flight.waiting += 1
            self.shared += joined
        return flight, joined

    def _begin(self, key: bytes, work: Coroutine[Any, Any, T]) -> Flight[T]:
        flight = self._flights[key] = Flight(work)
        flight.task.add_done_callback(lambda task: self._land(key, flight))
        return flight

    def _leave(self, key: bytes, flight: Flight[T]) -> None:
        with self._lock:
            flight.waiting -= 1
            if flight.waiting or flight.landed.done():
                return
            self._forget(key, flight)
        flight.give_up()

    def _land(self, key: bytes, flight: Flight[T]) -> None:
        with self._lock:
            self._forget(key, flight)
        flight.land()

    def _forget(self, key: bytes, flight: Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
