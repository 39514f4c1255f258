"""Who may take how much of the arena, so that nobody can wait for ever."""

from mmserve.core.arena import Arena, ArenaFull, Block
from mmserve.core.errors import MediaError, Overloaded

RESERVE = 4  # one part in so many is kept for requests that hold pixels already


class NoRoom(Exception):
    """There is no room now, and the request holds nothing: it may wait."""


class PixelMemory:
    """The arena, and the rule by which requests enter it.

    A request that holds no pixels waits, outside of any worker, until three quarters of the arena or less
    are in use and what it is known to need fits. One that holds pixels never waits: it takes from the
    rest, or it is refused and gives back what it holds. So whoever waits holds nothing, nobody waits for
    a waiter, and no worker is ever kept by a wait: there can be no deadlock. What is held goes back when
    requests end, are refused, or the engine has encoded their pixels.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._held: dict[object, int] = {}  # bytes of pixels by request

    def may_begin(self, request: object, needs: int) -> bool:
        if request in self._held or needs > self.arena.total:
            return True  # to go on, or to be refused
        if self.arena.used > self.arena.total - self.arena.total // RESERVE:
            return False
        return needs <= self.arena.largest_hole

    def take(self, request: object, nbytes: int, beside: int = 0) -> Block:
        """A block for ``request``, one of whose blocks of ``beside`` bytes must stay.

        MediaError if that can never fit, Overloaded if it does not fit now and the request holds pixels,
        NoRoom if it holds none.
        """
        held = self._held.get(request, 0)
        if nbytes + beside + held > self.arena.total:
            also = f", beside {_mib(held)} MiB for what else the request shows" if held else ""
            raise MediaError(
                f"it takes {_mib(nbytes + beside)} MiB of memory for pixels and file{also};"
                f" at most {_mib(self.arena.total)} are allowed (arena_mib)",
                code="media_too_large",
            )
        try:
            return self.arena.allocate(nbytes)
        except ArenaFull:
            if not held:
                raise NoRoom from None
            raise Overloaded(
                f"the memory for pixels is full ({_mib(self.arena.used)} of {_mib(self.arena.total)} MiB);"
                " try later, or send fewer pictures and clips at once"
            ) from None

    def hold(self, request: object, nbytes: int) -> None:
        """``request`` has been given so many bytes for pixels."""
        self._held[request] = self._held.get(request, 0) + nbytes

    def forget(self, request: object) -> None:
        """``request`` has nothing more to be seen."""
        self._held.pop(request, None)


def _mib(nbytes: int) -> int:
    return -(-nbytes // (1 << 20))
