"""/v1/realtime: OpenAI's Realtime protocol over a websocket, for text, pictures and cameras.

A session is closed with 1001 when the server stops, 1008 for a client that does not read, may not connect
or asks for what is no session here, 1009 for a message beyond ``max_message_bytes``, 1011 after a fault of
ours or a missed ping, 1013 by a full server, 4401 without a valid key, 4408 after silence, and 4429 for too
many events. Before each of these but 1009 and a missed ping stands an ``error`` event or a reason.
"""

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, WebSocket

from mmserve.core.errors import MMServeError, Overloaded
from mmserve.server.errors import Stopping, unsupported
from mmserve.server.models import check_model
from mmserve.server.realtime_events import Teller
from mmserve.server.realtime_eye import Watched
from mmserve.server.realtime_link import Inbox, Link, Rate
from mmserve.server.realtime_talk import Talk
from mmserve.server.socket_door import FRAMES, GOING_AWAY, IDLE, INTERNAL, TOO_MANY, close_code, subprotocol

log = logging.getLogger("mmserve.server")

router = APIRouter()


@router.websocket("/v1/realtime")
async def realtime(socket: WebSocket) -> None:
    chosen = subprotocol(socket.scope["subprotocols"])
    await socket.accept(chosen)
    state = socket.app.state
    link = Link(socket, state.config.realtime.realtime_unread_kib << 10)
    state.links.add(link)
    try:
        await _hold(socket, link, headers=chosen == FRAMES)
    finally:
        state.links.discard(link)


async def _hold(socket: WebSocket, link: Link, headers: bool) -> None:
    """Until either side ends it. What a client owned has ended too when this returns."""
    visit = Visitor(socket, link, headers)
    tasks = [asyncio.create_task(link.write()), asyncio.create_task(visit.attend())]
    try:
        with socket.app.state.drain.telling(visit.leave):
            ending = await asyncio.shield(link.ending)
    except asyncio.CancelledError:
        link.end(GOING_AWAY, "the server is stopping")
        ending = link.ending.result()
    await link.flushed()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await link.close(ending)


class Visitor:
    """One client: it is read at once, and heeded in order."""

    def __init__(self, socket: WebSocket, link: Link, headers: bool) -> None:
        self._socket, self._link, self._headers = socket, link, headers
        self._state = socket.app.state
        self._options = self._state.config.realtime
        self._inbox = Inbox(self._options.max_message_bytes)
        self._rate = Rate(self._options.realtime_events)
        self._talk: Talk | None = None

    def leave(self) -> None:
        """The server stops: end as soon as what is under way has."""
        if self._talk is not None:
            self._talk.leave()
        else:
            self._link.end(GOING_AWAY, "the server is stopping")

    async def attend(self) -> None:
        """Serve it until the link ends; a fault of ours ends it, and this client alone."""
        try:
            self._talk = await self._admitted()
        except MMServeError as error:
            Teller(self._link).fault(error)
            self._link.end(close_code(error), error.message)
            return
        jobs = [self._read(self._talk), self._heed(self._talk), self._watch_idle(self._talk)]
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            self._talk.begin()
            await asyncio.gather(*tasks)
        except Exception:
            log.exception("the realtime session %s failed", self._talk.id)
            self._link.end(INTERNAL, "the server failed; its log has the cause")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._talk.close()

    async def _admitted(self) -> Talk:
        """The conversation of a client that may have one."""
        state, query = self._state, self._socket.query_params
        if state.drain.begun:
            raise Stopping("the server is stopping; connect to another one")
        if len(state.links) > self._options.realtime_clients:
            raise Overloaded(f"{self._options.realtime_clients} clients are connected; try again later")
        if query.get("intent", "conversation") != "conversation" or "call_id" in query:
            raise unsupported("intent", "there are neither transcriptions nor calls here")
        if state.service.trouble is not None:
            raise Overloaded(f"the server is not ready: {state.service.trouble}")
        check_model(state.service, query.get("model"))
        owner = self._socket.scope["owner"]
        return Talk(
            state.service,
            state.desk,
            self._options,
            owner,
            self._link,
            camera=_camera(state, owner, query.get("camera")),
            headers=self._headers,
            rate=self._rate,
        )

    async def _read(self, talk: Talk) -> None:
        async for message in self._link.messages():
            if isinstance(message, bytes):
                talk.frame(message)
            elif self._rate.take():
                await self._inbox.put(message)
            else:
                return self._link.end(TOO_MANY, f"more than {self._rate.limit} events in a minute")

    async def _heed(self, talk: Talk) -> None:
        while True:
            await talk.handle(await self._inbox.take())

    async def _watch_idle(self, talk: Talk) -> None:
        seconds = self._options.realtime_idle_s
        while True:
            silent = self._link.silent_s
            if silent >= seconds and not self._inbox and not talk.busy:
                return self._link.end(IDLE, f"nothing was heard for {seconds:g} s")
            await asyncio.sleep(max(seconds - silent, min(1.0, seconds / 4)))


def _camera(state: Any, owner: str, key: str | None) -> Watched | None:
    """The camera that is named by ``key``, which somebody else feeds."""
    if key is None:
        return None
    found: Watched = state.cameras.get(owner, key)
    return found
