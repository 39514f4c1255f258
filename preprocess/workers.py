"""Who decodes pictures and clips and who lays out prompts: processes, or threads of this process."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from mmserve.core.messages import ChatInput
from mmserve.preprocess.media import MediaPart, Medium
from mmserve.preprocess.prompt import Prepared


class Workers(Protocol):
    """Preprocessing beside the caller's event loop; it may be called from any, also from several.

    Cancelling a call gives its place in the queue back at once, and tells a worker that has begun.
    """

    @property
    def ready(self) -> bool:
        """Whether jobs can be done now."""

    async def see(
        self, part: MediaPart, *, request: str | None = None, deadline: float | None = None
    ) -> Medium:
        """What one picture or clip becomes.

        Parts of the same ``request`` keep their order and share its turn: requests are served in rotation.
        ``deadline`` is in seconds of ``time.monotonic``. MediaError names the part that cannot be seen;
        Overloaded when too much waits already.
        """

    async def assemble(self, chat: ChatInput, media: Sequence[Medium]) -> Prepared:
        """The engine's request from ``chat`` and its seen parts, in their order."""

    def stats(self) -> dict[str, Any]:
        """Counts and gauges, for ``Service.stats`` and the metrics."""

    async def close(self) -> None:
        """End all workers; calls under way fail."""


async def prepare(workers: Workers, chat: ChatInput, parts: Sequence[MediaPart]) -> Prepared:
    """See all ``parts`` of ``chat`` at once, then assemble it; the first error gives up the others."""
    jobs = [workers.see(part, request=chat.request_id, deadline=chat.deadline) for part in parts]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        media = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return await workers.assemble(chat, media)
