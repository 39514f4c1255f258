"""Traces into figures: latencies in milliseconds, rates a second."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from mmserve.bench.client import Trace
from mmserve.bench.load import Run

POINTS = (50, 90, 99)


@dataclass(frozen=True)
class Goal:
    """What a good answer is: its first words within ``ttft_ms``, 99 of 100 gaps within ``itl_ms``."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def met(self, trace: Trace) -> bool:
        if trace.error or trace.ttft is None:
            return False
        slow = self.ttft_ms is not None and 1e3 * trace.ttft > self.ttft_ms
        return not slow and not (self.itl_ms is not None and self._stutters(trace))

    def _stutters(self, trace: Trace) -> bool:
        at_worst = percentile(trace.gaps, 99)
        return at_worst is not None and 1e3 * at_worst > (self.itl_ms or 0.0)


def summary(run: Run, goal: Goal) -> dict[str, Any]:
    """All figures of one run. Failed requests count in ``errors`` alone; a figure that nothing was there to
    tell is None."""
    good = [t for t in run.traces if not t.error]
    tokens = sum(t.tokens for t in good)
    return {
        "requests": len(run.traces),
        "errors": dict(Counter(t.error for t in run.traces if t.error)),
        "wall s": run.wall,
        **_spread("TTFT", [t.ttft for t in good if t.ttft is not None]),
        **_spread("ITL", [gap for t in good for gap in t.gaps]),
        **_spread("TPOT", [t.tpot for t in good if t.tpot is not None]),
        **_spread("e2e", [t.e2e for t in good]),
        "output tok/s": tokens / run.wall,
        "requests/s": len(good) / run.wall,
        "goodput/s": sum(map(goal.met, run.traces)) / run.wall,
        "prompt tokens": _sum(t.prompt_tokens for t in good),
        "cached tokens": _sum(t.cached_tokens for t in good),
        "output tokens": tokens,
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over ``rounds``; errors are added up."""
    result: dict[str, Any] = {}
    for name in rounds[0]:
        values = [r[name] for r in rounds if r[name] is not None]
        if name == "errors":
            result[name] = dict(sum((Counter(v) for v in values), Counter()))
        else:
            result[name] = median(values) if values else None
    return result


def ratio(over: Sequence[Mapping[str, Any]], under: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The median over rounds of figure ``name`` of one server by that of another in the same round."""
    pairs = [(a[name], b[name]) for a, b in zip(over, under, strict=True) if a[name] and b[name]]
    return median(a / b for a, b in pairs) if pairs else None


def percentile(values: Sequence[float], point: float) -> float | None:
    return float(np.percentile(values, point)) if len(values) else None


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and maximum, in milliseconds."""
    spread = {f"{name} mean ms": mean(seconds) if seconds else None}
    spread |= {f"{name} p{point} ms": percentile(seconds, point) for point in POINTS}
    spread[f"{name} max ms"] = max(seconds, default=None)
    return {key: None if value is None else 1e3 * value for key, value in spread.items()}


def _sum(counts: Any) -> int | None:
    """The sum of what was told; None if nothing was."""
    told = [count for count in counts if count is not None]
    return sum(told) if told else None
