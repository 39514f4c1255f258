"""What answers that are being written feel of pictures that arrive: gaps between tokens, with and without."""

import time
from collections.abc import Iterator, Sequence
from statistics import quantiles

from mmserve.core.messages import PreparedRequest, TokenOutput
from mmserve.engine.engine import Engine

PERIOD_S = 0.25  # between two pictures
ROUNDS = 2  # stretches of each kind, in turn, since machines drift


def p99(
    engine: Engine, streams: Sequence[PreparedRequest], pictures: Iterator[PreparedRequest], seconds: float
) -> tuple[float, float]:
    """(without, with) pictures: the 99th percentile of seconds between two tokens of ``streams``, whose
    answers must last for 2 * ROUNDS stretches of ``seconds`` each; RuntimeError where they do not."""
    for request in streams:
        engine.submit(request)
    names = {request.request_id for request in streams}
    last: dict[str, float] = {}
    while len(last) < len(names):
        last |= {o.request_id: time.perf_counter() for o in _tokens(engine) if o.request_id in names}
    gaps: tuple[list[float], list[float]] = [], []
    for stretch in range(2 * ROUNDS):
        _stretch(engine, names, pictures if stretch % 2 else iter(()), seconds, gaps[stretch % 2])
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return _p99(gaps[0]), _p99(gaps[1])


def _stretch(
    engine: Engine, names: set[str], pictures: Iterator[PreparedRequest], seconds: float, gaps: list[float]
) -> None:
    start = due = time.perf_counter()
    last: dict[str, float] = {}
    fewest = len(gaps) + 2
    while (now := time.perf_counter()) - start < seconds or len(gaps) < fewest:
        if now >= due and (request := next(pictures, None)) is not None:
            engine.submit(request)
            due += PERIOD_S
        outputs = _tokens(engine)
        now = time.perf_counter()
        for output in outputs:
            if output.request_id not in names:
                continue
            if output.finish_reason:
                raise RuntimeError("an answer ended before the stretch did")
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now


def _tokens(engine: Engine) -> list[TokenOutput]:
    found = [output for output in engine.step() if isinstance(output, TokenOutput)]
    failed = [output.error for output in found if output.finish_reason == "error"]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return found


def _p99(gaps: list[float]) -> float:
    return quantiles(gaps, n=100)[98]
