"""Requests that come at their moments: invented by a seed, or recorded as lines of JSON."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from mmserve.core.errors import ConfigError


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request: ``at`` seconds from the beginning. Its prompt is ``prefix_tokens`` that all requests of
    one ``prefix`` share, then its pictures of ``image_tokens`` each, then ``prompt_tokens`` of its own.

    Pictures with the same name in ``images`` are the same one; without names each is new.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    image_tokens: tuple[int, ...] = ()
    images: tuple[str, ...] = ()
    prefix: str = ""
    prefix_tokens: int = 0
    owner: str = ""
    priority: int = 0
    deadline_ms: int | None = None


SYSTEM_TOKENS = 64


def chats(rate: float, seconds: float, seed: int, deadline_ms: int | None = None) -> list[Arrival]:
    """``rate`` chats a second as a Poisson process, from four owners: a system prompt, none to three pictures
    of 64 to 1,024 tokens, 16 to 256 tokens of text, answers of 16 to 256 tokens."""
    random = np.random.default_rng(seed)
    moments = np.cumsum(random.exponential(1 / rate, int(rate * seconds * 1.5) + 50))
    return [
        Arrival(
            at=float(at),
            prompt_tokens=_spread(random, 16, 256),
            output_tokens=_spread(random, 16, 256),
            image_tokens=tuple(_spread(random, 64, 1024) for _ in range(random.integers(4))),
            prefix="system",
            prefix_tokens=SYSTEM_TOKENS,
            owner=f"key{random.integers(4)}",
            deadline_ms=deadline_ms,
        )
        for at in moments[moments < seconds]
    ]


def cameras(
    count: int,
    seconds: float,
    seed: int,
    *,
    fps: float = 1.0,
    every: float = 10.0,
    window: int = 4,
    frame_tokens: int = 64,
    deadline_ms: int | None = None,
) -> list[Arrival]:
    """``count`` cameras of ``fps`` frames a second, of four owners. Each is asked about its last ``window``
    frames ``every`` so many seconds, at a phase of its own, behind one system prompt for all: 16 tokens
    asked, 32 answered."""
    random = np.random.default_rng(seed)
    asked = [
        Arrival(
            at=float(at),
            prompt_tokens=16,
            output_tokens=32,
            image_tokens=(frame_tokens,) * window,
            images=tuple(f"{camera}/{int(at * fps) - i}" for i in reversed(range(window))),
            prefix="system",
            prefix_tokens=SYSTEM_TOKENS,
            owner=f"key{camera % 4}",
            deadline_ms=deadline_ms,
        )
        for camera, phase in enumerate(random.uniform(0, every, count))
        for at in np.arange(phase, seconds, every)
    ]
    return sorted(asked, key=lambda arrival: arrival.at)


def recorded(path: Path) -> list[Arrival]:
    """Lines of JSON with the fields of ``Arrival``; ConfigError names the line that is none."""
    return sorted(_lines(path), key=lambda arrival: arrival.at)


def _lines(path: Path) -> Iterator[Arrival]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="traffic") from None
    for number, line in enumerate(lines, 1):
        try:
            arrival = msgspec.json.decode(line, type=Arrival)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="traffic") from None
        if arrival.images and len(arrival.images) != len(arrival.image_tokens):
            raise ConfigError(f"{path}, line {number}: images must name each picture", param="traffic")
        yield arrival


def _spread(random: np.random.Generator, low: int, high: int) -> int:
    """Between ``low`` and ``high``, and as often in each doubling."""
    return int(np.exp(random.uniform(np.log(low), np.log(high))))
