"""How old frames are when they pass each stage on their way to an answer."""

from mmserve.core.metrics import Metrics
from mmserve.live.frame import Times

RECENT = 256  # ages that a session remembers, of each stage


class Ages:
    """Ages since capture, observed for all sessions of a service and remembered for one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._recent: dict[str, list[float]] = {}

    def frame(self, times: Times) -> None:
        """A frame has come as far as ``times`` say."""
        for stage in ("received", "gated", "decoded", "encoded", "prefilled"):
            at = getattr(times, stage)
            if at is not None:
                self.note(stage, at - times.captured)

    def note(self, stage: str, seconds: float) -> None:
        self._metrics.live_age(stage, max(0.0, seconds))
        recent = self._recent.setdefault(stage, [])
        recent.append(seconds)
        del recent[:-RECENT]

    def stats(self) -> dict[str, dict[str, float]]:
        """Median and 95th percentile of the recent ages by stage, in milliseconds."""
        return {stage: _quantiles(recent) for stage, recent in self._recent.items()}


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{q}": 1000 * ordered[round(last * q / 100)] for q in (50, 95)}
