"""Answers in JSON, whole or as a stream of events."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmserve.server.attend import attended
from mmserve.server.stream import EventStream


class Job(Protocol):
    """One request that a model is to answer."""

    async def complete(self) -> dict[str, Any]:
        """The whole answer."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""


def reply(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def answered(request: Request, job: Job, stream: bool | None) -> Response:
    """The answer of ``job`` in the way that was asked for; given up as soon as the client is gone."""
    if stream:
        return EventStream(job.events())
    return reply(await attended(request.receive, job.complete()))
