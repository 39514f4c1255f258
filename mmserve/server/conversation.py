"""A request's messages with their media, all of which is found before anything is decoded."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmserve.chat_format import media_refs, parse_messages
from mmserve.core.messages import Message
from mmserve.media import MediaDesk
from mmserve.media_options import Kind, Options


async def conversation(
    messages: Sequence[Mapping[str, Any]], desk: MediaDesk, owner: str, defaults: Mapping[Kind, Options]
) -> tuple[Message, ...]:
    """OpenAI-shaped ``messages`` of ``owner`` with their media; ``defaults`` go to parts that say nothing."""
    found = await desk.find(media_refs(messages), owner)
    return parse_messages(messages, lambda ref: found[ref.param], defaults=defaults)
