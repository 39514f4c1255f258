"""By when a caller wants its first token."""

from typing import Annotated

from msgspec import Meta

DAY_MS = 24 * 3600 * 1000
DeadlineMs = Annotated[int, Meta(ge=1, le=DAY_MS)]  # the field ``deadline_ms`` of a body


def deadline(started: float, deadline_ms: int | None) -> float | None:
    """The moment ``deadline_ms`` after the request came in; both moments in seconds of ``time.monotonic``."""
    return None if deadline_ms is None else started + deadline_ms / 1000
