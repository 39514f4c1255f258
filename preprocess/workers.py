"""Who decodes pictures and clips and who lays out prompts: processes, or threads of this process."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mmserve.core.arena import Arena
from mmserve.core.config import Config
from mmserve.core.messages import ChatInput
from mmserve.preprocess.media import MediaPart, Medium
from mmserve.preprocess.pool.pool import WorkerPool
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.prompt import Prepared
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.threads import ThreadWorkers

log = logging.getLogger(__name__)


class Workers(Protocol):
    """Preprocessing beside the caller's event loop; it may be called from any, also from several.

    Cancelling a call gives its place in the queue back at once, and tells a worker that has begun.
    """

    @property
    def arena(self) -> Arena | None:
        """The shared memory in which the pixels stand; None where they stand in this process alone."""

    @property
    def ready(self) -> bool:
        """Whether jobs can be done now."""

    def wait_ready(self) -> None:
        """Return when jobs can be done; WorkersDead if they never can."""

    async def see(
        self, part: MediaPart, *, request: str | None = None, deadline: float | None = None
    ) -> Medium:
        """What one picture or clip becomes.

        Parts of the same ``request`` keep their order and share its turn: requests are served in rotation.
        ``deadline`` is in seconds of ``time.monotonic``. MediaError names the part that cannot be seen;
        Overloaded when too much waits already.
        """

    async def glance(self, data: bytes, *, request: object) -> np.ndarray:
        """The luma thumbnail of an encoded picture, uint8 [h, w] (see ``luma_of_file``); ``request`` shares
        one turn, as in ``see``. MediaError if it cannot be read; Overloaded when too much waits already."""

    async def assemble(self, chat: ChatInput, media: Sequence[Medium]) -> Prepared:
        """The engine's request from ``chat`` and its seen parts, in their order."""

    def stats(self) -> dict[str, Any]:
        """Counts and gauges, for ``Service.stats`` and the metrics."""

    async def close(self) -> None:
        """End all workers; calls under way fail."""


def make_workers(spec: ProcessorSpec, config: Config) -> Workers:
    """The form that ``config.media.workers`` asks for. Processes go on starting after this returns."""
    media = config.media
    if media.workers:
        log.info("%d processes decode pictures and clips, one more lays out prompts", media.workers)
        return WorkerPool(spec, media)
    log.info("pictures and clips are decoded on threads of this process (workers is 0)")
    return ThreadWorkers(Processor(spec, media), max_preparing=media.max_preparing)
