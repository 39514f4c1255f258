"""What a server says about a camera, as its client sees it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from mmserve.core.errors import MMServeError

End = Literal["stop", "length", "cut", "cancelled"]


class LiveError(MMServeError):
    """An answer failed, or the connection has ended: then ``closed`` is its close code (1006 without any)."""

    code = "live_error"
    closed: int | None = None


class Piece(Struct, frozen=True, kw_only=True):
    """A piece of an answer. The last one has no text but a ``finish``: ``stop``, ``length``, ``cut`` by a
    newer question, or ``cancelled``; and the token counts in ``usage``.

    ``age_ms`` is how long ago, when the server said this, the newest frame was captured that the answer could
    know of; ``frame_seq`` is its number, as ``LiveClient.put`` told it. None where no frame was known.
    """

    text: str
    age_ms: float | None = None
    frame_seq: int | None = None
    finish: End | None = None
    usage: dict[str, Any] = {}


class Answer:
    """One answer in pieces; to be iterated over once. LiveError where it fails."""

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.ended = False
        self._pieces: asyncio.Queue[Piece | LiveError] = asyncio.Queue()

    async def text(self) -> str:
        """All of it."""
        return "".join([piece.text async for piece in self])

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, LiveError):
                raise piece
            yield piece
            if piece.finish is not None:
                return

    # ------------------------------------------------------------ for the client

    def heard(self, event: Mapping[str, Any]) -> None:
        """A text delta of it."""
        sight = event.get("mmserve") or {}
        self._pieces.put_nowait(
            Piece(text=event["delta"], age_ms=sight.get("age_ms"), frame_seq=sight.get("frame_seq"))
        )

    def done(self, response: Mapping[str, Any]) -> None:
        """The server has told how it ended."""
        details = response.get("status_details") or {}
        if response["status"] == "failed":
            error = details.get("error") or {}
            self.fail(LiveError(error.get("message", "the answer failed"), code=error.get("code")))
        else:
            sight = response.get("mmserve") or {}
            self._end(
                Piece(
                    text="",
                    age_ms=sight.get("age_ms"),
                    frame_seq=sight.get("frame_seq"),
                    finish=_finish(response["status"], details.get("reason")),
                    usage=response.get("usage") or {},
                )
            )

    def fail(self, error: LiveError) -> None:
        self._end(error)

    def _end(self, last: Piece | LiveError) -> None:
        if not self.ended:
            self.ended = True
            self._pieces.put_nowait(last)


def _finish(status: str, reason: str | None) -> End:
    if status == "cancelled":
        return "cut" if reason == "turn_detected" else "cancelled"
    return "length" if status == "incomplete" else "stop"
