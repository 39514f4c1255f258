"""When does a decode need its next page? Only then is it looked at."""

from mmserve.engine.scheduler.request import Request


class Growth:
    """A calendar of steps. A request gains at most one token a step, so one with room for k more is not
    looked at for k steps: with pages of 16 tokens a step looks at a sixteenth of the decodes.

    ``request.full_at`` says which entry of a request holds; it may have left older ones behind.
    """

    def __init__(self) -> None:
        self.step = 0
        self._full: dict[int, list[Request]] = {}

    def watch(self, request: Request) -> None:
        """Look at ``request`` in the first step to come in which its pages may be used up."""
        request.full_at = self.step + 1 + request.table.capacity - request.num_tokens
        self._full.setdefault(request.full_at, []).append(request)

    def next_step(self) -> list[Request]:
        """Begin a step: the requests to look at, each of which is to be watched again if it goes on."""
        self.step += 1
        return [r for r in self._full.pop(self.step, ()) if r.full_at == self.step]

    @property
    def coming(self) -> int:
        """How many are to be looked at in the next step, at most; each needs one page."""
        return len(self._full.get(self.step + 1, ()))

    def check_integrity(self, decoding: list[Request]) -> None:
        """AssertionError unless every decode is looked at in time."""
        for request in decoding:
            assert request in self._full[request.full_at], "a decode that nobody looks at"
            most = request.num_tokens + request.full_at - self.step - 2  # in the step before it is looked at
            assert most <= request.table.capacity, "a decode that is looked at too late"
