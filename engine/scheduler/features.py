"""What the scheduler asks about encoded pictures: how far may a prompt be computed?"""

from typing import Protocol

from mmserve.core.messages import VisionItem
from mmserve.engine.scheduler.request import Request


class Features(Protocol):
    """Pins of encoded items. Only running requests hold any, and only items right after their last
    computed token, in order: so a request that waits for an item holds no other, and what is held is
    always computed next and given back. Requests can wait for each other's pool room, not deadlock.
    """

    def encoded(self, item: VisionItem) -> bool:
        """Whether the item's features are in the pool, or being computed: nobody else need encode it."""

    def cost(self, item: VisionItem) -> int:
        """Vision tokens that are encoded for the item: those of its whole grid."""

    def claim(self, request: Request) -> None:
        """Pin the encoded items that follow, drop their pixels, and move ``request.ready_len`` up to the
        first that is not encoded."""

    def release_computed(self, request: Request) -> None:
        """Unpin the items that ``request.computed_len`` has passed."""

    def release(self, request: Request) -> None:
        """Unpin everything."""
