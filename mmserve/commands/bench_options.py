"""What the benchmark commands ask for alike."""

import argparse
from pathlib import Path


def count(text: str) -> int:
    """A whole number from 1 up."""
    return _whole(text, 1)


def count_or_none(text: str) -> int:
    """A whole number from 0 up."""
    return _whole(text, 0)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 up, like 1,2."""
    return tuple(count(part) for part in text.split(","))


def amount(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def size(text: str) -> tuple[int, int]:
    """(width, height) in pixels, like 512x512."""
    width, _, height = text.partition("x")
    try:
        return count(width), count(height)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be like 512x512, not {text!r}") from None


def sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Sizes like 256x256,1024x768."""
    return tuple(size(part) for part in text.split(","))


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} up, not {text!r}")
    return value
