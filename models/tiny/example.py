"""The unit of tiny-vl's training and evaluation: some frames and a conversation about them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its one right answer.

    ``task`` names the row of the evaluation table; ``facts`` is what the answer must contain for
    tasks that are judged by facts rather than word for word.
    """

    task: str
    question: str
    answer: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Example:
    """``frames`` is uint8 RGB ``[F, H, W, 3]``: F = 1 is a picture, an even F >= 2 a clip at ``fps``."""

    frames: np.ndarray
    turns: tuple[Turn, ...]
    kind: str
    fps: float = 2.0
