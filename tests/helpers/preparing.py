"""Requests through preprocessing, without the desk in front of it."""

import asyncio

import numpy as np
from helpers.media_files import picture_file

from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams
from mmserve.preprocess.media import media_parts


def chat_of(*parts, name="r", **fields):
    return ChatInput(request_id=name, messages=(Message("user", parts),), sampling=SamplingParams(), **fields)


def picture(seed=0, size=(64, 64), **fields):
    """A small part of its own; equal seeds are equal pictures."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    return ImagePart(data=picture_file(pixels), **fields)


async def prepared(workers, chat):
    """See all parts at once, then assemble; the first error leaves the others."""
    tasks = [
        asyncio.ensure_future(workers.see(part, request=chat.request_id, deadline=chat.deadline))
        for part in media_parts(chat, 64)
    ]
    try:
        media = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return await workers.assemble(chat, media)
