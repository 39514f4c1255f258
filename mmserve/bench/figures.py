"""Figures with what they are held against, and a bound on the time that measuring them takes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Peers = Mapping[str, "float | str"]


@dataclass(frozen=True)
class Goal:
    """``most`` or ``least`` of a figure's ``share``, or of its value where it has no share."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def told(self, percent: bool) -> str:
        sign, bound = (">=", self.least) if self.least is not None else ("<=", self.most)
        assert bound is not None
        return f"{sign} {100 * bound:.0f} %" if percent else f"{sign} {bound:g}"


@dataclass(frozen=True)
class Figure:
    """One line. ``share``: of what the machine can do. ``peers``: the same by others, in the same unit, or
    why there is none. ``error``: why there is no value."""

    model: str
    name: str
    value: float | None
    unit: str
    share: float | None = None
    goal: Goal | None = None
    peers: Peers = field(default_factory=dict)
    error: str | None = None

    @property
    def met(self) -> bool | None:
        """None where there is nothing to meet."""
        judged = self.value if self.share is None else self.share
        return None if self.goal is None else judged is not None and self.goal.met(judged)

    def row(self, peers: Sequence[str]) -> dict[str, Any]:
        """A row of the table, with a column for each of ``peers``."""
        return {
            "model": self.model,
            "figure": self.name,
            "measured": self.error or _amount(self.value, self.unit),
            "of the machine": None if self.share is None else f"{100 * self.share:.0f} %",
            "goal": self.goal and self.goal.told(self.share is not None),
            "met": {True: "yes", False: "no", None: None}[self.met],
        } | {name: _amount(self.peers.get(name), self.unit) for name in peers}

    def report(self) -> dict[str, Any]:
        """For JSON."""
        goal = self.goal and {"least": self.goal.least, "most": self.goal.most}
        told = {"model": self.model, "figure": self.name, "value": self.value, "unit": self.unit}
        judged = {"share": self.share, "goal": goal, "met": self.met}
        return told | judged | {"peers": dict(self.peers), "error": self.error}


def _amount(value: float | str | None, unit: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


class Budget:
    """Seconds to spend: what would begin when they are spent is left out, and says so."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()


class Ledger:
    """Figures as they are measured. ``keep`` is told all so far after each, so that none is lost."""

    def __init__(self, budget: Budget, keep: Callable[[Sequence[Figure]], None]) -> None:
        self.budget = budget
        self.figures: list[Figure] = []
        self._keep = keep

    def measure(self, model: str, name: str, unit: str, work: Callable[[], Sequence[Figure]]) -> None:
        """The figures of ``work``; one without a value, called ``name``, if it fails or there is no time."""
        try:
            if self.budget.left <= 0:
                raise TimeoutError("not measured: no time was left")
            found = list(work())
        except Exception as error:
            told = str(error) if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            found = [Figure(model, name, None, unit, error=told.splitlines()[0][:200])]
        self.figures += found
        self._keep(self.figures)

    def compare(self, model: str, name: str, peer: str, work: Callable[[], float]) -> None:
        """What ``work`` finds stands beside the figure ``name`` of ``model``, as that of ``peer``; why there
        is nothing, if it fails or no time is left."""
        found: float | str
        try:
            found = work() if self.budget.left > 0 else "no time was left"
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        for index, figure in enumerate(self.figures):
            if (figure.model, figure.name) == (model, name):
                self.figures[index] = replace(figure, peers={**figure.peers, peer: found})
        self._keep(self.figures)
