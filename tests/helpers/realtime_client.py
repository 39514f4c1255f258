"""A raw client of /v1/realtime, which holds each event to the official client's types."""

import asyncio
import contextlib
import json

from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

EVENT = TypeAdapter(RealtimeServerEvent)
PATIENCE_S = 20.0  # for what must come; a test that fails takes as long


class Client:
    """Events as dicts."""

    def __init__(self, socket):
        self.socket = socket
        self.heard = []

    async def send(self, *events):
        for event in events:
            await self.socket.send(event if isinstance(event, str | bytes) else json.dumps(event))

    async def event(self):
        event = json.loads(await asyncio.wait_for(self.socket.recv(), PATIENCE_S))
        if not event["type"].startswith("mmserve."):
            EVENT.validate_python(event, strict=True)
        self.heard.append(event)
        return event

    async def until(self, kind):
        """The events up to the first of ``kind``."""
        events = [await self.event()]
        while events[-1]["type"] != kind:
            events.append(await self.event())
        return events

    async def ask(self, text, **response):
        await self.send(item(text), {"type": "response.create", "response": response})
        return await self.until("response.done")

    async def closed(self):
        """How the server ends it: the code, the reason, and what it said before."""
        said = []
        with contextlib.suppress(ConnectionClosed):
            while True:
                said.append(json.loads(await asyncio.wait_for(self.socket.recv(), PATIENCE_S)))
        return self.socket.close_code, self.socket.close_reason, said


@contextlib.asynccontextmanager
async def joined(url, query="", **options):
    """A raw client whose session has begun."""
    async with knocking(url, query, **options) as client:
        assert (await client.event())["type"] == "session.created"
        yield client


@contextlib.asynccontextmanager
async def knocking(url, query="", *, subprotocols=None, **options):
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime{query}"
    options = {"max_size": None, "max_queue": None, "compression": None, **options}
    async with connect(address, subprotocols=subprotocols, **options) as socket:
        yield Client(socket)


def said(text, role="user", **fields):
    part = {"type": "output_text" if role == "assistant" else "input_text", "text": text}
    return {"type": "message", "role": role, "content": [part], **fields}


def item(text, **fields):
    return {"type": "conversation.item.create", "item": said(text, **fields)}


def kinds(events):
    return [event["type"] for event in events]


def text_of(events):
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
