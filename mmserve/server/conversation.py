"""The media of a request: fetched all at once, on the event loop, then put into the messages."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from mmserve.chat_format import media_refs, parse_messages
from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import Message, Part
from mmserve.media import fetch_media
from mmserve.server.protocol import MediaDefaults

Result = TypeVar("Result")


async def conversation(
    messages: Sequence[Mapping[str, Any]], limits: MediaOptions, defaults: MediaDefaults | None = None
) -> tuple[Message, ...]:
    """OpenAI-shaped ``messages`` with their media fetched; ``defaults`` go to parts that set none."""
    refs = media_refs(messages)
    if len(refs) > limits.max_items:
        raise InvalidRequest(
            f"{len(refs)} pictures and clips are too many; at most {limits.max_items} in one request",
            param="messages",
        )
    blobs = await _together([fetch_media(ref, limits) for ref in refs])
    parsed = parse_messages(messages, dict(zip(refs, blobs, strict=True)).__getitem__)
    return parsed if defaults is None else tuple(_with_defaults(m, defaults) for m in parsed)


async def _together(jobs: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; the first error cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _with_defaults(message: Message, defaults: MediaDefaults) -> Message:
    return msgspec.structs.replace(message, content=tuple(_filled(p, defaults) for p in message.content))


def _filled(part: Part, defaults: MediaDefaults) -> Part:
    missing = {
        name: value
        for name, value in msgspec.structs.asdict(defaults).items()
        if value is not None and getattr(part, name, value) is None
    }
    return msgspec.structs.replace(part, **missing) if missing else part
