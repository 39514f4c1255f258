"""Work on behalf of a client, dropped as soon as the client is gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from mmserve.server.errors import ClientGone

Result = TypeVar("Result")


async def attended(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``; ClientGone, with ``work`` cancelled, if the client closes first.

    The request's body must have been read: ``receive`` then only ever says that the client is gone.
    On every way out ``work`` has ended, so what it owned (a generation in the engine) is released.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        for job in (task, watch):
            job.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
