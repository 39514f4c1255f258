"""A client of /v1/realtime for one camera: frames out, answers in, and a connection that comes back."""

import asyncio
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode, urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.typing import Subprotocol

from mmserve.client.answers import Answer, LiveError, Piece
from mmserve.client.frames import SUBPROTOCOL, Slot, Unknown, message

PASSING = {1001, 1006, 1011, 1012, 1013, 4408, 4429}  # close codes after which trying again makes sense
LOST = 1006  # the code of an end without one
SEEN_S = 10.0  # for the first frame to be seen; then questions are asked all the same
CLOSING_S = 2.0  # for the server to say goodbye
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0  # between two tries
MOST_UNREAD = 16  # answers to triggers that wait for somebody to read them
Event = dict[str, Any]


class LiveClient:
    """To be used as an async context manager, which connects. All of it in one event loop.

    ``server`` is the server's address, with or without ``/v1``. ``policy`` are fields of ``session.mmserve``
    (``fps``, ``window_s``, ``trigger``, ``sampling``, ...; ARCHITECTURE.md, "Realtime"). ``camera`` names one
    that the server has from elsewhere: then nothing is ``put`` here, and its own policy holds unless one is
    given. ``synced`` says that this machine's clock agrees with the server's, which makes ages exact; without
    it the fastest frame counts as having taken no time.

    A connection that is lost, or refused for want of room, is made again for ``give_up_s`` seconds; the
    server begins anew then, and answers under way end with an error. LiveError
    where the first connection fails, the server refuses what is asked for, or it was given up.

    ``on_event`` hears every event of the server's as it comes.
    """

    def __init__(
        self,
        server: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        policy: Mapping[str, Any] | None = None,
        instructions: str | None = None,
        max_tokens: int | None = None,
        camera: str | None = None,
        synced: bool = False,
        give_up_s: float = 60.0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.fates: Counter[str] = Counter()  # of frames: what the server told of them, by reason
        self.sent = 0  # frames that left
        self.replaced = 0  # frames that did not, since a newer one was there first
        self.connections = 0
        self._address = address(server, camera)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._policy = {"delta_age": True, **(policy or {})}
        self._instructions, self._max_tokens = instructions, max_tokens
        self._watching = camera is not None
        self._synced = synced
        self._give_up_s = give_up_s
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._slot = Slot()
        self._socket: ClientConnection | None = None
        self._unknown = Unknown()
        self._ready = asyncio.Event()  # connected, with the session as it shall be
        self._seen = asyncio.Event()  # something can be asked about
        self._hope: asyncio.TimerHandle | None = None  # sets it if the server tells nothing
        self._closing = False
        self._over: LiveError | None = None
        self._gone = asyncio.Event()
        self._well = False  # the server has seen a frame, or answered, over this connection
        self._fault: LiveError | None = None  # what the server complained of last
        self._refused: LiveError | None = None  # why the session cannot be as it shall be
        self._asked: dict[str, Answer] = {}
        self._updates: dict[str, asyncio.Future[None]] = {}  # not answered yet, in their order
        self._replies: list[Event] = []  # to what is being heeded
        self._fresh = False  # connected, and not ready yet
        self._open: dict[str, Answer] = {}  # by the server's id
        self._unread: deque[Answer] = deque(maxlen=MOST_UNREAD)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LiveClient":
        self._task = asyncio.create_task(self._run())
        try:
            await self._until(self._ready)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection, and every answer under way."""
        self._closing = True
        if self._task is not None:
            if self._socket is not None:
                await self._socket.close()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end(LiveError("the client was closed", code="closed"))

    async def ended(self) -> LiveError:
        """Return when the client has ended, with the reason: it was given up, refused or closed."""
        await self._gone.wait()
        assert self._over is not None
        return self._over

    # ------------------------------------------------------------ frames

    def put(self, data: bytes, captured: float | None = None) -> int:
        """Leave a frame (a JPEG, PNG or WebP file), captured at a moment of ``time.monotonic``, now if not
        given; its number. It never waits: a frame that cannot leave before the next one never does."""
        seq = next(self._numbers)
        captured = time.monotonic() if captured is None else captured
        self.replaced += self._slot.put(message(data, seq, captured, self._synced))
        return seq

    # ------------------------------------------------------------ questions

    async def ask(
        self,
        question: str,
        *,
        max_tokens: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        remember: bool = True,
    ) -> AsyncGenerator[Piece, None]:
        """The answer about what is seen now, in pieces; leaving early (``contextlib.aclosing``) cancels it.

        It waits for a connection and until the first frame was seen. A newer question cuts the one under way,
        or waits, as the policy's ``on_new_question`` says. ``sampling`` has the fields of other endpoints.
        LiveError where the answer fails or the connection is lost meanwhile.
        """
        response: Event = {"instructions": question}
        if max_tokens is not None:
            response["max_output_tokens"] = max_tokens
        if sampling is not None:
            response["mmserve"] = {"sampling": dict(sampling)}
        if not remember:
            response["conversation"] = "none"
        await self._until(self._ready)
        await self._until(self._seen)
        name, answer = f"ask_{next(self._numbers)}", Answer()
        response["metadata"] = {"ask": name}
        self._asked[name] = answer
        try:
            await self._say({"type": "response.create", "event_id": name, "response": response})
            async for piece in answer:
                yield piece
        finally:
            self._asked.pop(name, None)
            if not answer.ended and answer.response_id is not None:
                with suppress(LiveError):
                    await self._say({"type": "response.cancel", "response_id": answer.response_id})

    async def answers(self) -> AsyncIterator[Answer]:
        """The answers that the policy's ``trigger`` starts, as they begin; the oldest that nobody read are
        let go. It ends with the LiveError that ends the client."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            self._news.clear()
            await self._until(self._news)

    async def update(self, policy: Mapping[str, Any], instructions: str | None = None) -> None:
        """Change the policy, or the instructions, from now on. LiveError, with nothing changed, where the
        server refuses."""
        await self._until(self._ready)
        name = f"update_{next(self._numbers)}"
        self._updates[name] = done = asyncio.get_running_loop().create_future()
        session: Event = {"type": "realtime", "mmserve": dict(policy)}
        if instructions is not None:
            session["instructions"] = instructions
        await self._say({"type": "session.update", "event_id": name, "session": session})
        await done
        self._policy |= policy
        self._instructions = self._instructions if instructions is None else instructions

    # ------------------------------------------------------------ the connection

    async def _run(self) -> None:
        """Connect, again and again, until there is no sense in it."""
        pause, since = FIRST_PAUSE_S, time.monotonic()
        while True:
            began, self._well = time.monotonic(), False
            ended = await self._visit()
            self._lose(ended)
            if self._closing:
                return
            if self._well or time.monotonic() - began > SEEN_S:
                pause, since = FIRST_PAUSE_S, time.monotonic()
            away = time.monotonic() - since
            if not self.connections or ended.closed not in PASSING or away >= self._give_up_s:
                return self._end(ended)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _visit(self) -> LiveError:
        """One connection, from its beginning to its end; why it ended."""
        self._fault = None
        try:
            async with connect(
                self._address,
                subprotocols=[Subprotocol(SUBPROTOCOL), Subprotocol("realtime")],
                additional_headers=self._headers,
                compression=None,
                max_size=None,
                close_timeout=CLOSING_S,
            ) as socket:
                return await self._talk(socket)
        except ConnectionClosed as closed:
            if closed.rcvd is None:
                return self._why(LOST, "the network, or the server, is gone")
            return self._why(closed.rcvd.code, closed.rcvd.reason)
        except (OSError, InvalidHandshake, TimeoutError) as error:
            return _ended(f"{self._shown} cannot be reached: {error}", LOST)
        except InvalidURI:
            return LiveError(f"{self._shown} is no address of a server", code="invalid_value", param="server")

    async def _talk(self, socket: ClientConnection) -> LiveError:
        self._socket, self._unknown, self._fresh = socket, Unknown(), True
        await socket.send(json.dumps(self._session_update()))
        sender = asyncio.create_task(self._send_frames(socket, self._unknown))
        try:
            async for text in socket:
                event = json.loads(text)
                self._heed(event)
                if self._refused is not None:
                    return self._refused
                while self._replies:
                    await socket.send(json.dumps(self._replies.pop(0)))
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        return self._why(socket.close_code or LOST, socket.close_reason or "")

    async def _send_frames(self, socket: ClientConnection, unknown: Unknown) -> None:
        await self._ready.wait()
        told = self._policy.get("frame_ack", "all") == "all"
        while True:
            await unknown.room()
            frame = await self._slot.take()
            await socket.send(frame)
            self.sent += 1
            if not told:
                self._seen.set()
                continue
            unknown.sent()
            if self._hope is None:
                self._hope = asyncio.get_running_loop().call_later(SEEN_S, self._seen.set)

    async def _say(self, event: Event) -> None:
        if self._socket is None:
            raise LiveError("the connection was lost", code="connection_lost")
        try:
            await self._socket.send(json.dumps(event))
        except ConnectionClosed:
            raise LiveError("the connection was lost", code="connection_lost") from None

    def _session_update(self) -> Event:
        session: Event = {"type": "realtime", "mmserve": self._policy}
        if self._instructions is not None:
            session["instructions"] = self._instructions
        if self._max_tokens is not None:
            session["max_output_tokens"] = self._max_tokens
        return {"type": "session.update", "event_id": "session", "session": session}

    def _why(self, code: int, reason: str) -> LiveError:
        said = reason if self._fault is None else self._fault.message
        return _ended(
            f"the connection to {self._shown} was ended ({code}): {said or 'no reason given'}", code
        )

    def _lose(self, ended: LiveError) -> None:
        """What was under way ends with the connection."""
        self._socket = None
        self._ready.clear()
        self._seen.clear()
        if self._hope is not None:
            self._hope.cancel()
            self._hope = None
        lost = LiveError(ended.message, code=ended.code)
        lost.closed = ended.closed
        for answer in (*self._asked.values(), *self._open.values()):
            answer.fail(lost)
        self._asked.clear()
        self._open.clear()
        for name in list(self._updates):
            self._updated(name, lost)

    def _end(self, why: LiveError) -> None:
        self._lose(why)
        self._over = self._over or why
        for waited_for in (self._ready, self._seen, self._news, self._gone):
            waited_for.set()

    async def _until(self, event: asyncio.Event) -> None:
        await event.wait()
        if self._over is not None:
            raise self._over

    @property
    def _shown(self) -> str:
        return self._address.partition("/v1/")[0]

    # ------------------------------------------------------------ what the server says

    def _heed(self, event: Event) -> None:
        match event["type"]:
            case "session.updated":
                self.connections, self._fresh = self.connections + self._fresh, False
                if self._watching:
                    self._seen.set()
                if self._ready.is_set() and self._updates:
                    self._updated(next(iter(self._updates)), None)
                self._ready.set()
            case "mmserve.frame.ack":
                self.fates[event["reason"]] += 1
                self._unknown.told()
                if event["kept"]:
                    self._seen.set()
            case "response.created":
                self._begin(event["response"])
            case "response.output_text.delta":
                if event["response_id"] in self._open:
                    self._open[event["response_id"]].heard(event)
            case "response.done":
                answer = self._open.pop(event["response"]["id"], None)
                if answer is not None:
                    answer.done(event["response"])
            case "error":
                self._complain(event["error"])
        self._well |= self._seen.is_set() or event["type"].startswith("response.")
        if self._on_event is not None:
            self._on_event(event)

    def _begin(self, response: Event) -> None:
        name = (response.get("metadata") or {}).get("ask")
        if name is not None and name not in self._asked:  # whoever asked has left
            self._replies.append({"type": "response.cancel", "response_id": response["id"]})
            return
        answer = self._asked[name] if name is not None else Answer()
        if name is None:
            self._unread.append(answer)
            self._news.set()
        answer.response_id = response["id"]
        self._open[response["id"]] = answer

    def _updated(self, name: str, fault: LiveError | None) -> None:
        done = self._updates.pop(name)
        if done.done():
            return
        if fault is None:
            done.set_result(None)
        else:
            done.set_exception(fault)

    def _complain(self, error: Event) -> None:
        about = error.get("event_id")
        fault = LiveError(error["message"], code=error.get("code"), param=error.get("param"))
        if about in self._asked:
            self._asked[about].fail(fault)
        elif about in self._updates:
            self._updated(about, fault)
        elif about == "session":
            self._refused = fault
        elif about is None:
            self._fault = fault


def _ended(message: str, code: int) -> LiveError:
    error = LiveError(message, code="connection_lost")
    error.closed = code
    return error


def address(server: str, camera: str | None = None) -> str:
    """Where the websocket of ``server`` is; LiveError if that is no address."""
    parts = urlsplit(server if "://" in server else f"http://{server}")
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.netloc:
        raise LiveError(f"a server is given as an http(s) URL, not {server!r}", param="server")
    path = parts.path.rstrip("/").removesuffix("/v1")
    query = "" if camera is None else "?" + urlencode({"camera": camera})
    return f"{scheme}://{parts.netloc}{path}/v1/realtime{query}"
