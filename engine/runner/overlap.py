"""Steps in flight: step N + 1 is scheduled and launched while the device computes step N.

    host     | schedule 1, launch | schedule 2, launch | results of 1 | schedule 3, launch | results of 2 |
    device                        |==== step 1 ====|==== step 2 ====|==== step 3 ====|
                                   sampled ids stay here and are step 2's token ids

At most one step is in flight when another is launched, and results of the older one are handled right after:
so two for a moment, whose rows know each other by the device alone.

**What advances when a step is launched.** All that is counted: ``computed_len`` of decodes and chunks, the
place of each token that is drawn (``Request.reach``), pages, the features that a prompt has passed, prefixes
published to the tree, the sampler's counts. Everything that reads what the step writes is launched behind it
on the same stream, so "computed" and "launched" are the same to it: pages may be freed, given to others,
shared or copied at once, also when their request ends or is aborted, while the step that writes to them still
runs. (Only the encoder has another stream; what both touch is guarded in ``encoders/stage.py``.)

**What advances with its results.** All that needs a token's value or tells the world: ``token_ids``, ends by
a stop token, forms of answers (their matchers), outputs, times of first tokens, ends of warm requests,
``Mixing``'s measurements, which are the device's own seconds from the beginning of a step to its end.

**Ends.** An end by length is known at the launch: such a request is ``ending`` and in no later step. One by a
stop token is seen one step late: the next step has a row for a request that has ended, whose token is dropped
(``Request.append`` takes back what was counted, results of finished requests are passed over). Its row wrote
to a slot of its own behind what was published, so neither the tree nor anybody's answer can tell.

**Who waits.**

* A draw that reads the words of a request on the host (``Sampler.needs_words``: forms of answers, budgets of
  thoughts, bad words) waits for the results before it. Its forward does not: that has been launched by then.
  Rows of those who turn out to have ended are not drawn.
* A sampler that draws on the host, for want of a form for the device, and a prompt's own log-probabilities
  wait for their forward, as they must, since they read logits. (Their step is in flight for what comes after
  it all the same.)
* A step that may have to preempt (``Scheduler.tight``) waits for results before it is scheduled, since ends
  may make room. A request that is preempted all the same with a token in flight waits in the queue and is not
  admitted until that is known.
* Whatever is read into a pinned half or a result's buffer waits for its own event (``staging.py``).

**Aborts** take effect at once, in flight or not; the row's token is dropped. **Failures.** A launch that
raises has changed nothing that counts: the results before it are handled, then its requests end, or where
memory was short, the newest of them. An error that shows only in results (the device's own) is raised out of
``Engine.step``: tokens, prefixes and counts rest on a step that never was. **n > 1** are requests as others.

On a CPU each launch is done when it returns. The same code runs with ``overlap on``, in the same order, and
answers must be the same; by default it is off there, for it hides nothing and tells tokens a step late.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmserve.core.device import Device, Timer
from mmserve.engine.runner.staging import Fetched, Fetches, Staging
from mmserve.engine.sampling.drawn import Drawn, Sampled
from mmserve.engine.scheduler.request import Batch, Request


def choose_overlap(wanted: str, device: torch.device) -> tuple[str, str]:
    """(on or off, why) of the option ``overlap`` on ``device``."""
    if wanted != "auto":
        return wanted, "asked for"
    if device.type == "cpu":
        return "off", "a CPU has computed a step when its launch returns, so there is nothing to hide"
    return "on", "the next step is scheduled and launched while the device computes"


@dataclass(slots=True)
class Flight:
    """A step that was launched and whose results were not handled yet."""

    batch: Batch
    sampling: list[Request]  # the requests of ``drawn``'s rows
    drawn: Drawn | None
    fetched: Fetched
    timer: Timer
    typical: bool  # its seconds are a measure for others

    def results(self) -> list[tuple[Request, Sampled]]:
        """Every row's request and token, once the device is there; to be asked once."""
        arrays = self.fetched.wait()
        sampled = self.drawn.results(*arrays) if self.drawn else []
        return list(zip(self.sampling, sampled, strict=True))


class Feed:
    """Sets the token ids of a step from those of the step in flight, on the device."""

    def __init__(self, device: Device, most: int) -> None:
        """``most``: rows of the largest step of decodes."""
        self._staging = Staging(device)
        self._rows, self._sources = (
            torch.zeros(most, dtype=torch.int64, device=device.torch_device) for _ in range(2)
        )

    def of(self, flight: Flight | None, decodes: Sequence[Request]) -> Callable[[torch.Tensor], None] | None:
        """For a step that begins with ``decodes``; None when the host knows all their tokens."""
        if flight is None or flight.drawn is None:
            return None
        ids = flight.drawn.ids.clamp(min=0)  # no token is allowed where it says NO_TOKEN: that row is dropped
        if decodes == flight.sampling:
            return lambda token_ids: _first(token_ids, ids)
        place = {request: row for row, request in enumerate(flight.sampling)}
        rows = [row for row, request in enumerate(decodes) if request.unknown]
        if not rows:
            return None
        sources = [place[decodes[row]] for row in rows]
        return lambda token_ids: self._some(token_ids, ids, np.array(rows), np.array(sources))

    def _some(
        self,
        token_ids: torch.Tensor,
        ids: torch.Tensor,
        rows: npt.NDArray[Any],
        sources: npt.NDArray[Any],
    ) -> None:
        at, taken = self._rows[: len(rows)], self._sources[: len(rows)]
        with self._staging.turn() as fill:
            fill(at, rows)
            fill(taken, sources)
        token_ids.index_copy_(0, at, ids[taken])


def _first(token_ids: torch.Tensor, ids: torch.Tensor) -> None:
    token_ids[: len(ids)].copy_(ids)


class Overlap:
    """The step in flight, and what takes one there."""

    def __init__(self, device: Device, most_rows: int, clock: Callable[[], float]) -> None:
        self.flight: Flight | None = None
        self.feed = Feed(device, most_rows)
        self._device = device
        self._fetches = Fetches(device)
        self._clock = clock

    @property
    def waited_seconds(self) -> float:
        """How long the host has waited for results."""
        return self._fetches.waited_seconds

    @property
    def launched_warm(self) -> list[Request]:
        """Warm requests in the step in flight, which end with its results."""
        return [c.request for c in self.flight.batch.prompts if c.request.warm] if self.flight else []

    def feeding(self, batch: Batch) -> Callable[[torch.Tensor], None] | None:
        """See ``Feed.of``."""
        return self.feed.of(self.flight, batch.decodes)

    def timer(self) -> Timer:
        timer = self._device.timer(self._clock)
        timer.start()
        return timer

    def launched(
        self, batch: Batch, sampling: list[Request], drawn: Drawn | None, timer: Timer, typical: bool
    ) -> Flight:
        """``batch`` was computed and drawn, as far as the host is concerned."""
        timer.stop()  # before the copies, so that it has happened when they have
        fetched = self._fetches.start(drawn.copies if drawn else ())
        return Flight(batch, sampling, drawn, fetched, timer, typical)

    def landing(self) -> Flight | None:
        """The step in flight, which is none any more."""
        flight, self.flight = self.flight, None
        return flight
