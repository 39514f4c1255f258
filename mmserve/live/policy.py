"""How a session watches and answers: one record, each field checked with an error that names it."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

from msgspec import Struct, structs

from mmserve.core.errors import InvalidRequest

Trigger = Literal["ask", "every", "change", "still"]
OnNewQuestion = Literal["cut", "finish"]

# field: (fewest, most) of its numbers
_RANGES: dict[str, tuple[float, float]] = {
    "fps": (0.01, 60.0),
    "max_pixels": (256, 1 << 26),
    "window_s": (0.1, 86_400.0),
    "window_items": (1, 4096),
    "retention": (0.0, 1.0),
    "memory": (0, 1024),
    "max_frame_age_ms": (1.0, 3_600_000.0),
    "deadline_ms": (1.0, 3_600_000.0),
    "every_s": (0.05, 86_400.0),
    "still_s": (0.0, 3600.0),
    "heartbeat_s": (0.1, 86_400.0),
    "sensitivity": (0.0, 1.0),
    "weight": (0.01, 100.0),
    "pruning_rate": (0.0, 0.99),
}


class SessionPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session's policy. InvalidRequest, whose ``param`` is the field's name, where a value is not allowed.

    Watching: at most ``fps`` frames a second go to the model, each of at most ``max_pixels`` (the model's own
    bound where that is less), and none that is older than ``max_frame_age_ms``. A frame that shows nothing
    new is left out: ``sensitivity`` from 0 (only what is plain to see) to 1 (any difference); every
    ``heartbeat_s`` one is taken all the same. ``pair`` makes one vision item of two frames. Of a frame that
    follows another at most the share ``pruning_rate`` of its tokens is left out, where it shows what was
    there before; now and then one is whole.

    Remembering: when there are more than ``window_items`` items, or the oldest is older than ``window_s``,
    the oldest go in bulk, so that ``retention`` of the window is left. ``memory`` earlier questions with
    their answers stay in the context.

    Answering: an answer that has not ended after ``deadline_ms`` ends with an error. ``trigger`` says what
    has the standing ``question`` answered by itself: ``every`` so many seconds (``every_s``), each
    ``change`` of the scene, or a change that was ``still`` for ``still_s`` afterwards; with ``ask`` nothing.
    ``on_new_question`` says whether an answer under way is ``cut`` by the next question or may ``finish``.
    ``weight`` is the session's share where many cameras must be slowed down.
    """

    fps: float = 2.0
    max_pixels: int = 1 << 18
    window_s: float | None = None
    window_items: int = 32
    retention: float = 0.5
    memory: int = 4
    max_frame_age_ms: float = 5000.0
    deadline_ms: float | None = None
    trigger: Trigger = "ask"
    question: str | None = None
    every_s: float | None = None
    still_s: float = 1.0
    on_new_question: OnNewQuestion = "cut"
    heartbeat_s: float = 60.0
    pair: bool = False
    sensitivity: float = 0.5
    weight: float = 1.0
    pruning_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, hint in _HINTS.items():
            _check(name, hint, getattr(self, name))
        if self.trigger == "every" and self.every_s is None:
            raise InvalidRequest("every_s is needed where trigger is 'every'", param="every_s")
        if self.trigger != "every" and self.every_s is not None:
            raise InvalidRequest(
                f"every_s contradicts trigger {self.trigger!r}; it goes with 'every'", param="every_s"
            )
        if self.trigger != "ask" and not self.question:
            raise InvalidRequest(
                f"question is needed where trigger is {self.trigger!r}: it is what is answered",
                param="question",
            )

    @classmethod
    def of(cls, values: Mapping[str, Any], base: "SessionPolicy | None" = None) -> "SessionPolicy":
        """``base``, or the defaults, with ``values`` in their places. InvalidRequest for an unknown name."""
        unknown = sorted(set(values) - set(_HINTS))
        if unknown:
            raise InvalidRequest(
                f"unknown field {unknown[0]!r}; known: {', '.join(_HINTS)}", param=unknown[0]
            )
        return structs.replace(base or cls(), **values)


def _check(name: str, hint: Any, value: Any) -> None:
    kinds = get_args(hint) or (hint,)
    if all(isinstance(kind, str) for kind in kinds):
        if value not in kinds:
            raise InvalidRequest(f"{name} must be one of {', '.join(kinds)}, not {value!r}", param=name)
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (isinstance(value, kinds) and isinstance(value, bool) <= (bool in kinds)) and not (
        number and float in kinds
    ):
        raise InvalidRequest(f"{name} must be {_names(kinds)}, not {value!r}", param=name)
    if number and name in _RANGES:
        low, high = _RANGES[name]
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name} must be from {low:g} to {high:g}, not {value!r}", param=name)


def _names(kinds: tuple[Any, ...]) -> str:
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)


_HINTS: dict[str, Any] = get_type_hints(SessionPolicy)
