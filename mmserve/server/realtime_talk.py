"""One realtime conversation: the client's events in, heeded one after the other, and the server's out.

Without a camera the items are the conversation, and each response is a request like any other: what it has in
common with the one before is cached. With the first frame (or where a camera is watched that somebody else
feeds) the camera's session is the context: items are told to it, and a response is an answer about now.
"""

import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from mmserve.core.config import RealtimeOptions
from mmserve.core.errors import ContextLengthExceeded, InvalidRequest, MMServeError
from mmserve.core.messages import ChatInput, Message, TextPart
from mmserve.media import MediaDesk
from mmserve.server.deadline import deadline
from mmserve.server.errors import Stopping, told, unsupported
from mmserve.server.parsed import parsed
from mmserve.server.realtime_events import (
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    Outlet,
    ResponseCancel,
    ResponseCreate,
    RetentionRatio,
    SessionUpdate,
    Teller,
    read_event,
    read_head,
)
from mmserve.server.realtime_eye import Eye, Opening, Watched
from mmserve.server.realtime_frames import FrameReader, looks_like_picture
from mmserve.server.realtime_items import Conversation, Fields, Item, ItemReader, folded, oldest, said
from mmserve.server.realtime_link import Rate
from mmserve.server.realtime_response import Response, Said
from mmserve.server.realtime_settings import Settings, Wanted
from mmserve.server.socket_door import GOING_AWAY
from mmserve.server.tokenize import Tokenizing

log = logging.getLogger("mmserve.server")

MOST_RESPONSES = 8  # of one client at once
RETENTION = 0.8  # what stays of a conversation that has outgrown its context, if the client does not say


class Talk:
    """Over an ``outlet``, of one owner. ``handle`` is to be called from one coroutine, ``close`` in the end.

    ``camera`` is one to watch that somebody else feeds; ``headers`` whether frames may have one; ``rate``
    what ``rate_limits.updated`` tells.
    """

    def __init__(
        self,
        service: Tokenizing,
        desk: MediaDesk,
        options: RealtimeOptions,
        owner: str,
        outlet: Outlet,
        *,
        camera: Watched | None = None,
        headers: bool = False,
        rate: Rate | None = None,
    ) -> None:
        self.id = f"sess_{uuid.uuid4().hex[:24]}"
        self._service, self._options, self._owner = service, options, owner
        self._outlet, self._rate = outlet, rate
        self._teller = Teller(outlet)
        self._settings = Settings()
        self._items = Conversation(options.realtime_conversation_mib << 20)
        self._reader = ItemReader(service, desk, owner)
        self._frames = FrameReader(headers)
        self._responses: list[Response] = []  # that have not ended, in the order in which they began
        self._leaving = False
        self._eye: Eye | None = None
        if camera is not None:
            self._settings = Settings(policy=camera.session.policy)
            self._eye = self._new_eye()
            self._eye.attach(camera)

    def begin(self) -> None:
        """Tell that the session is there."""
        self._teller.tell("session.created", session=self._shown())

    @property
    def busy(self) -> bool:
        """Whether something goes on that a client may wait for in silence."""
        return bool(self._responses) or (self._eye is not None and not self._eye.ours)

    def leave(self) -> None:
        """Begin nothing more, and end when the responses under way have ended."""
        self._leaving = True
        self._end_if_left()

    async def close(self) -> None:
        """End everything without a word."""
        for response in list(self._responses):
            await response.stop()
        if self._eye is not None:
            await self._eye.close()

    # ------------------------------------------------------------ what the client says

    async def handle(self, text: str) -> None:
        """Heed one event. What is wrong with it is told by an ``error`` event, and changes nothing."""
        about = None
        try:
            head = read_head(text)
            about = head.event_id
            event = read_event(text, head)
            await _HANDLERS[type(event)](self, event)
        except MMServeError as error:
            self._teller.fault(error, about)
        except Exception as error:
            log.exception("an event of %s failed", self.id)
            self._teller.fault(told(error), about)
        await self._outlet.room()

    def frame(self, message: bytes) -> None:
        """Take a binary message; it never waits."""
        try:
            frame = self._frames.read(message)
        except MMServeError as error:
            return self._teller.fault(error)
        if self._eye is not None and not self._eye.ours:
            self._teller.fault(
                unsupported("frame", "this camera is fed by somebody else; frames are not taken")
            )
            return
        eye = self._eye or self._new_eye()
        data = frame.data or b""
        if len(data) > self._options.max_frame_bytes:
            eye.drop(frame, "too_big")
        elif not looks_like_picture(data):
            eye.drop(frame, "decode_error")
            if data[:1] == b"{":
                hint = "binary messages are frames; events are sent as text messages"
                self._teller.fault(InvalidRequest(hint, param="frame"))
        else:
            if self._eye is None:
                self._eye = eye
                eye.open(self._opening())
            eye.put(frame)

    async def _update(self, event: SessionUpdate) -> None:
        old, new = self._settings, self._settings.updated(event.session, self._service)
        if self._eye is not None:
            before, after = self._template_kwargs(old), self._template_kwargs(new)
            kwargs = None if before == after else after
            await self._eye.update(old, new, kwargs, new.standing(self._service))
        self._settings = new
        self._teller.tell("session.updated", echo=True, session=self._shown())

    async def _create(self, event: ItemCreate) -> None:
        item = await self._reader.read(event.item)
        after = event.previous_item_id
        self._items.check(item, after, may_drop=self._settings.truncation != "disabled")
        if self._eye is not None:
            if after not in (None, self._items.last_id):
                raise unsupported("previous_item_id", "beside a camera items can only be put at the end")
            await self._eye.tell(item)
        previous = self._items.put(item, after)
        for kind in ("added", "done"):
            told = {"previous_item_id": previous, "item": item.shown}
            self._teller.tell(f"conversation.item.{kind}", echo=True, **told)
        self._let_go(self._items.too_much())

    async def _delete(self, event: ItemDelete) -> None:
        item = self._items.get(event.item_id)
        if self._eye is not None:
            await self._eye.forget(item)
        self._let_go([item])

    async def _retrieve(self, event: ItemRetrieve) -> None:
        item = self._items.get(event.item_id)
        self._teller.tell("conversation.item.retrieved", echo=True, item=item.whole())

    async def _respond(self, event: ResponseCreate) -> None:
        if self._leaving:
            raise Stopping("the server is stopping and begins no more responses; connect to another one")
        wanted = self._settings.wanted(event.response, self._service)
        if len(self._responses) >= MOST_RESPONSES:
            raise InvalidRequest(
                f"at most {MOST_RESPONSES} responses may be under way at once", code="too_many_responses"
            )
        running = self._running() if wanted.conversation == "auto" else None
        cuts = self._eye is not None and wanted.input is None
        if running is not None and not cuts:
            raise InvalidRequest(
                f"the conversation has the response {running.id} under way; cancel it, or wait for its end,"
                ' or set conversation to "none"',
                code="conversation_already_has_active_response",
            )
        answer = await self._answer(wanted)
        if running is not None and self._settings.policy.on_new_question == "cut":
            running.cancel("turn_detected")
        self._begin(answer, wanted, running)

    async def _cancel(self, event: ResponseCancel) -> None:
        wanted = event.response_id
        found = [r for r in self._responses if wanted == r.id or (wanted is None and r.conversation_id)]
        if not found:
            what = (
                "no response is under way" if wanted is None else f"no response {wanted[:100]!r} is under way"
            )
            raise InvalidRequest(what, param="response_id", code="response_cancel_not_active")
        for response in found:
            response.cancel("client_cancelled")

    # ------------------------------------------------------------ responses

    def _begin(self, answer: AsyncGenerator[Said, None], wanted: Wanted, after: Response | None) -> None:
        kept = wanted.conversation == "auto"
        response = Response(
            self._teller,
            answer,
            conversation_id=self._items.id if kept else None,
            max_output_tokens=wanted.settings.max_output_tokens,
            metadata=wanted.metadata,
            place=self,
            created=self._limits,
            ended=self._ended,
            tell_age=self._settings.own.delta_age,
        )
        self._responses.append(response)
        response.begin(after)

    def _running(self) -> Response | None:
        """The response that was begun last in the conversation, if it has not ended."""
        return next((r for r in reversed(self._responses) if r.conversation_id is not None), None)

    def _ended(self, response: Response) -> None:
        self._responses.remove(response)
        self._end_if_left()

    def enter(self, shown: Fields) -> str | None:
        """An item of a response begins (``Place``)."""
        return self._items.put(said(shown))

    def settle(self, shown: Fields) -> None:
        """It has ended, as ``shown``; unless the client has deleted it meanwhile."""
        self._items.replace(said(shown))
        self._let_go(self._items.too_much())

    def _answered(self, answer: AsyncGenerator[Said, None]) -> None:
        """The camera's session answers by itself."""
        self._begin(answer, self._settings.wanted(None, self._service), self._running())

    async def _answer(self, wanted: Wanted) -> AsyncGenerator[Said, None]:
        """The answer to be, which begins when it is first asked for a piece."""
        name = f"rt-{uuid.uuid4().hex}"
        if wanted.input is not None:
            return self._of_items(wanted, await self._brought(wanted.input), name, whole=False)
        if self._eye is None:
            if not len(self._items) and not wanted.settings.instructions:
                raise InvalidRequest("there is nothing to answer: create an item first")
            return self._of_items(wanted, list(self._items), name, whole=True)
        text = wanted.settings.instructions if wanted.instructions_given else ""
        return self._eye.ask(wanted, [TextPart(text)] if text else [], name)

    async def _brought(self, given: Sequence[Any]) -> list[Item]:
        """The items that a response brings itself, or names."""
        items = []
        for number, fields in enumerate(given):
            where = f"response.input[{number}]"
            if isinstance(fields, dict) and fields.get("type") == "item_reference":
                items.append(self._items.get(str(fields.get("id")), f"{where}.id"))
            else:
                items.append(await self._reader.read(fields, where))
        return items

    async def _of_items(
        self, wanted: Wanted, items: list[Item], name: str, whole: bool
    ) -> AsyncGenerator[Said, None]:
        """The answer to ``items``; the ``whole`` conversation is cut where it does not fit."""
        if whole:
            items = self._within_limit(items)
        while True:
            try:
                async with aclosing(
                    parsed(self._service, self._chat(wanted, items, name), wanted.tools)
                ) as pieces:
                    async for piece in pieces:
                        yield Said(piece.events, piece.output.usage, piece.output.finish_reason)
                return
            except MMServeError as error:
                if error.code != ContextLengthExceeded.code or not whole:
                    raise
                fewer = self._cut(items, self._retention * sum(item.tokens for item in items))
                if len(fewer) == len(items):
                    raise
                items = fewer

    def _chat(self, wanted: Wanted, items: Sequence[Item], name: str) -> ChatInput:
        system = wanted.settings.instructions
        before = [Message("system", (TextPart(system),))] if system else []
        return ChatInput(
            request_id=f"{name}-{len(items)}",
            messages=(*before, *folded(items)),
            sampling=wanted.sampling,
            stop=wanted.stop,
            template_kwargs=wanted.template_kwargs,
            owner=self._owner,
            priority=wanted.priority,
            deadline=deadline(wanted.asked, wanted.deadline_ms),
        )

    # ------------------------------------------------------------ truncation

    @property
    def _retention(self) -> float:
        wanted = self._settings.truncation
        return wanted.retention_ratio if isinstance(wanted, RetentionRatio) else RETENTION

    def _within_limit(self, items: list[Item]) -> list[Item]:
        """``items`` cut to the client's own limit, if it has set one."""
        wanted = self._settings.truncation
        limits = wanted.token_limits if isinstance(wanted, RetentionRatio) else None
        most = limits.post_instructions if limits else None
        if most is None or sum(item.tokens for item in items) <= most:
            return items
        return self._cut(items, self._retention * most)

    def _cut(self, items: list[Item], keep_tokens: float) -> list[Item]:
        """The newest of ``items``, about ``keep_tokens`` of them; the others leave the conversation, all at
        once, so that what stays is the same, and cached, for a while."""
        if self._settings.truncation == "disabled":
            return items
        gone = oldest(items, keep_tokens)
        self._let_go(gone)
        return items[len(gone) :]

    def _let_go(self, items: Sequence[Item]) -> None:
        for item in items:
            if self._items.remove(item.id):
                self._teller.tell("conversation.item.deleted", item_id=item.id)

    # ------------------------------------------------------------ the rest

    def _new_eye(self) -> Eye:
        return Eye(self._teller, lambda: self._settings, self._answered, self._outlet.end)

    def _opening(self) -> Opening:
        return Opening(
            desk=self._service.live,
            settings=self._settings,
            standing=self._settings.standing(self._service),
            items=tuple(self._items),
            template_kwargs=self._template_kwargs(self._settings),
            owner=self._owner,
        )

    def _template_kwargs(self, settings: Settings) -> dict[str, Any]:
        return settings.wanted(None, self._service).template_kwargs

    def _shown(self) -> Fields:
        return self._settings.shown(self.id, self._service.model_name)

    def _limits(self) -> None:
        """What a client may still do before it is closed; it is told after each response's beginning."""
        limits = []
        if self._rate is not None:
            reset_s = round(self._rate.reset_s, 3)
            left = {"limit": self._rate.limit, "remaining": self._rate.remaining, "reset_seconds": reset_s}
            limits.append({"name": "requests", **left})
        self._teller.tell("rate_limits.updated", rate_limits=limits)

    def _end_if_left(self) -> None:
        if self._leaving and not self._responses:
            self._outlet.end(GOING_AWAY, "the server is stopping")


_HANDLERS: dict[Any, Callable[[Talk, Any], Awaitable[None]]] = {
    SessionUpdate: Talk._update,
    ItemCreate: Talk._create,
    ItemDelete: Talk._delete,
    ItemRetrieve: Talk._retrieve,
    ResponseCreate: Talk._respond,
    ResponseCancel: Talk._cancel,
}
