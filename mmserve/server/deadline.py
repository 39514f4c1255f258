"""By when a caller wants its first token."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from msgspec import Meta

from mmserve.core.errors import DeadlineExceeded

DAY_MS = 24 * 3600 * 1000
DeadlineMs = Annotated[int, Meta(ge=1, le=DAY_MS)]  # the field ``deadline_ms`` of a body


def deadline(started: float, deadline_ms: int | None) -> float | None:
    """The moment ``deadline_ms`` after the request came in; both moments in seconds of ``time.monotonic``."""
    return None if deadline_ms is None else started + deadline_ms / 1000


@asynccontextmanager
async def fetched_by(moment: float | None) -> AsyncIterator[None]:
    """DeadlineExceeded when the block, which fetches a request's media, has not ended at ``moment``."""
    try:
        async with asyncio.timeout(None if moment is None else moment - time.monotonic()):
            yield
    except TimeoutError:
        said = "the deadline of the request passed while its media were fetched"
        raise DeadlineExceeded(said, param="deadline_ms") from None
