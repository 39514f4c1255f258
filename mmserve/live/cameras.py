"""The cameras of a server: each a live session, and what feeds it.

A camera comes by WebRTC or is pulled, and then has a process of its own in which its media are decoded; or
it is uploaded, and then its frames are encoded pictures, which the worker pool decodes. Whatever becomes of
one ends that one alone.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import structs

from mmserve.core.config import Config
from mmserve.core.errors import MMServeError, NotFound, Overloaded
from mmserve.live.desk import LiveDesk
from mmserve.live.frame import Fate, Frame
from mmserve.live.policy import SessionPolicy
from mmserve.live.session import LiveSession
from mmserve.live.sources.messages import (
    Answered,
    Away,
    Drop,
    Ended,
    FromCamera,
    Heard,
    Live,
    Offer,
    Opened,
    Picture,
    PullHello,
    Say,
    Tally,
    ToCamera,
    Watch,
)
from mmserve.live.sources.process import CameraProcess, Spare

log = logging.getLogger("mmserve.cameras")

Kind = Literal["pull", "whip", "mjpeg"]
State = Literal["connecting", "live", "away", "ended"]

LOOK_S = 0.25  # between two looks after all cameras
LINGER_S = 60.0  # that a camera which has ended is still told of
MOST_LINGERING = 256
MOST_DEATHS, DEATHS_S = 3, 600.0  # of a pulled camera's process, and it is given up
RESTART_S = 1.0
ANSWER_S = 60.0  # for a process to start and to answer an offer, on a busy machine
OLDEST_S = 3600.0  # a frame is not believed to be older
MOST_HEARD = 64  # messages of a data channel that wait for those before
STOPPING = "the server is stopping"


class Conversation(Protocol):
    """What is said over a camera's data channel; ``handle`` takes one text of the client's at a time."""

    def begin(self) -> None: ...
    async def handle(self, text: str) -> None: ...
    async def close(self) -> None: ...


class Channel:
    """The server's way into a camera's data channel."""

    def __init__(self, camera: "Camera") -> None:
        self._camera = camera
        self.ended = asyncio.Event()

    def send(self, text: str, echo: bool = False) -> None:
        if not self._camera.say(Say(text)):
            self.end(1013, "the camera does not read its data channel")

    async def room(self) -> None:
        """There is always some: who does not read is ended by the camera's process."""

    def end(self, code: int, reason: str) -> None:
        self.ended.set()


Converse = Callable[["Camera", Channel], Conversation]


class Camera:
    """One camera of ``owner``. ``session`` is fed by it and ends with it: ask it, but do not close it.

    ``ended`` is set when it is no more; ``why`` tells then, and while it is away.
    """

    def __init__(
        self, kind: Kind, owner: str, name: str | None, url: str | None, session: LiveSession
    ) -> None:
        self.id = f"camera-{secrets.token_hex(12)}"
        self.kind, self.owner, self.name, self.url, self.session = kind, owner, name, url, session
        self.state: State = "connecting"
        self.why = self.what = ""
        self.ended = asyncio.Event()
        self.created = time.time()
        self.began = time.monotonic()
        self.expected: float | None = self.began  # since when it could show something; None: not yet
        self.seen: float | None = None  # when a frame came last
        self.finished: float | None = None
        self.received = 0
        self.lost: Counter[Fate] = Counter()  # before the session had them
        self.send: Callable[[ToCamera], bool] | None = None  # to its process, while it has one
        self.tag = ""  # of a WHIP session: the ETag of its answer, and what its offer was known by
        self.ufrag: str | None = None

    def put(self, frame: Frame) -> None:
        """A frame has come."""
        self.session.put(frame)
        self.came(1)

    def say(self, message: ToCamera) -> bool:
        """To its process; False if there is none, or it does not listen."""
        return self.send is not None and self.send(message)

    def watch(self, policy: SessionPolicy) -> None:
        """The session's policy has changed, which its process needs to know."""
        self.say(Watch(policy))

    def tally(self, received: int, dropped: dict[Fate, Drop]) -> None:
        """Its process tells of frames that came, and of those that ended there."""
        for fate, drop in dropped.items():
            self.lost[fate] += drop.count
            self.session.drop(fate, drop.seq, _past(drop.captured, time.monotonic()), drop.count)
        self.received += received
        if received > dropped.get("decode_error", _NONE).count:
            self.came(0)

    def card(self) -> dict[str, Any]:
        """What is told of it."""
        age = None if self.seen is None else round(1000 * (time.monotonic() - self.seen), 1)
        return {
            "id": self.id,
            "object": "camera",
            "kind": self.kind,
            "name": self.name,
            "url": self.url,
            "state": self.state,
            "why": self.why or None,
            "stream": self.what or None,
            "created_at": int(self.created),
            "frames_received": self.received,
            "last_frame_ms": age,
            "policy": structs.asdict(self.session.policy),
        }

    def came(self, count: int) -> None:
        """Frames have come; ``count`` of them are not counted yet."""
        self.received += count
        self.seen = time.monotonic()
        if self.state != "ended":
            self.state, self.why = "live", ""


class Cameras:
    """All cameras, of all owners; used in the server's event loop. ``watch`` looks after them for ever."""

    def __init__(self, live: LiveDesk, config: Config, stopping: Callable[[], bool] = lambda: False) -> None:
        self.converse: Converse | None = None  # what a data channel is connected to
        self._live = live
        self._config = config
        self._options = config.cameras
        self._stopping = stopping
        self._cameras: dict[str, Camera] = {}
        self._opening = 0
        self._spare = Spare(config.cameras, config.media, config.server.hang_timeout_s)
        self._jobs: dict[Camera, set[asyncio.Task[None]]] = {}

    # ------------------------------------------------------------ finding

    def of(self, owner: str) -> list[Camera]:
        """An owner's cameras, the eldest first; those that have ended a while ago are forgotten."""
        return [camera for camera in self._cameras.values() if camera.owner == owner]

    def get(self, owner: str, key: str) -> Camera:
        """One of ``owner``'s by its id, or the newest of that name. NotFound if there is none."""
        found = [camera for camera in self.of(owner) if key in (camera.id, camera.name)]
        running = [camera for camera in found if camera.state != "ended"]
        if not found:
            raise NotFound(f"you have no camera {key[:100]!r}, or it has ended", param="camera")
        return (running or found)[-1]

    @property
    def running(self) -> list[Camera]:
        return [camera for camera in self._cameras.values() if camera.state != "ended"]

    # ------------------------------------------------------------ coming and going

    async def open(
        self,
        kind: Kind,
        owner: str,
        policy: SessionPolicy,
        *,
        instructions: str | None = None,
        name: str | None = None,
        url: str | None = None,
    ) -> Camera:
        """A new camera with a session. Overloaded if there are too many, or the server can watch no more."""
        if len(self.running) + self._opening >= self._options.max_cameras:
            raise Overloaded(f"there are {self._options.max_cameras} cameras, the most at once; try later")
        self._opening += 1
        try:
            session = await self._live.open(policy, instructions=instructions, owner=owner)
        finally:
            self._opening -= 1
        camera = Camera(kind, owner, name, url, session)
        session.changed.append(camera.watch)
        self._cameras[camera.id] = camera
        self._jobs[camera] = set()
        log.info("%s: a %s camera begins%s", camera.id, kind, f" ({url})" if url else "")
        return camera

    def pull(self, camera: Camera, url: str, loop: bool) -> None:
        """Feed ``camera`` from ``url``, which has been checked."""
        config = self._config
        hello = PullHello(url, loop, camera.session.policy, self._options, config.media)
        self.spawn(camera, self._feed(camera, hello))

    async def answer(self, camera: Camera, offer: str, reached: str | None) -> str:
        """Feed ``camera`` from the WebRTC client that offers this; the answer. MMServeError if there is none,
        and the camera has ended then."""
        camera.expected = None
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        work = self._attend(camera, Offer(offer, reached, camera.session.policy), answered)
        self.spawn(camera, work).add_done_callback(lambda done: _unanswered(camera, answered))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answered
        except TimeoutError:
            raise Overloaded("the camera's process does not start in time; try later") from None
        finally:
            camera.expected = time.monotonic()
            if not answered.done() or answered.cancelled() or answered.exception():
                await self.end(camera, "there was no answer to its offer")

    async def end(self, camera: Camera, why: str) -> None:
        """End ``camera``, its session and its process. Twice is once."""
        if camera.state == "ended":
            return
        camera.state, camera.why, camera.finished = "ended", why, time.monotonic()
        camera.ended.set()
        log.info("%s: ended: %s", camera.id, why)
        jobs = self._jobs.pop(camera) - {asyncio.current_task()}
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await camera.session.close(why)

    def spawn(self, camera: Camera, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do ``work`` for as long as ``camera`` is there; a fault in it ends the camera."""
        task = asyncio.create_task(self._guarded(camera, work))
        self._jobs[camera].add(task)
        task.add_done_callback(lambda done: self._jobs.get(camera, set()).discard(done))
        return task

    def expect(self) -> None:
        """A WebRTC client will come: have a process wait for it."""
        self._spare.begin()

    async def watch(self) -> None:
        """End those whose time is up; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for camera in self.running:
                if why := self._overdue(camera, now):
                    await self.end(camera, why)
            self._forget(now)

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(self.end(camera, STOPPING) for camera in self.running))
        await self._spare.close()

    def stats(self) -> dict[str, int]:
        """Cameras that run, by kind."""
        return dict(Counter(camera.kind for camera in self.running))

    def _overdue(self, camera: Camera, now: float) -> str | None:
        options, age = self._options, now - camera.began
        if self._stopping():
            return None if _answering(camera) else STOPPING
        if age > options.camera_max_s:
            return f"it has run for {options.camera_max_s:g} s, the most for a camera (camera_max_s)"
        if camera.kind == "pull":
            return None  # its process knows when it has been away for too long
        if camera.seen is None and camera.expected and now - camera.expected > options.camera_connect_s:
            return f"it showed nothing within {options.camera_connect_s:g} s (camera_connect_s)"
        if camera.seen is not None and now - camera.seen > options.camera_idle_s:
            return f"it has shown nothing for {options.camera_idle_s:g} s (camera_idle_s)"
        return None

    def _forget(self, now: float) -> None:
        ended = [c for c in self._cameras.values() if c.finished is not None]
        late = [c for c in ended if c.finished is not None and now - c.finished > LINGER_S]
        for camera in {*late, *ended[: max(0, len(ended) - MOST_LINGERING)]}:
            del self._cameras[camera.id]

    async def _guarded(self, camera: Camera, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("%s: a fault in feeding it", camera.id)
            await self.end(camera, "the server failed to feed it; its log has the cause")

    # ------------------------------------------------------------ processes

    async def _feed(self, camera: Camera, hello: PullHello) -> None:
        """From the start of a pulled camera's process to its end, again and again."""
        deaths: list[float] = []
        while True:
            hang_s = self._config.server.hang_timeout_s
            ended = await self._life(camera, await CameraProcess.start(hello, self._options, hang_s))
            if isinstance(ended, Ended):
                return await self.end(camera, ended.why)
            log.warning("%s: its process has ended: %s", camera.id, ended)
            now = time.monotonic()
            deaths = [at for at in deaths if at > now - DEATHS_S] + [now]
            if len(deaths) > MOST_DEATHS:
                return await self.end(camera, f"its process has ended ({ended})")
            camera.state, camera.why = "away", f"its process has ended ({ended})"
            await asyncio.sleep(RESTART_S * 2 ** len(deaths))
            hello = structs.replace(hello, policy=camera.session.policy)

    async def _attend(self, camera: Camera, offer: Offer, answered: asyncio.Future[str]) -> None:
        """From a WebRTC client's offer to its end."""
        process = await self._spare.take()
        process.line.say(offer)
        ended = await self._life(camera, process, answered)
        if not isinstance(ended, Ended):
            ended = Ended(f"its process has ended ({ended})")
        if answered.done():
            await self.end(camera, ended.why)
        else:  # ``answer`` ends it
            answered.set_exception(ended.fault.error() if ended.fault else MMServeError(ended.why))

    async def _life(
        self, camera: Camera, process: CameraProcess, answered: asyncio.Future[str] | None = None
    ) -> Ended | str:
        """One process: its last word, or how it ended without one."""
        talk = Talking(camera, self)
        camera.send = process.line.say
        try:
            while True:
                message, pixels = await process.line.receive()
                if isinstance(message, Ended):
                    return message
                if isinstance(message, Answered):
                    if answered is not None and not answered.done():
                        answered.set_result(message.sdp)
                elif isinstance(message, Opened | Heard):
                    talk.hear(message)
                else:
                    _take(camera, message, pixels)
        except EOFError:
            return await process.how()
        except ValueError as error:
            return f"it says what no camera would: {error}"
        finally:
            camera.send = None
            await talk.close()
            await process.end()


class Talking:
    """What is said over one data channel, in order."""

    def __init__(self, camera: Camera, cameras: Cameras) -> None:
        self._camera, self._cameras = camera, cameras
        self._heard: asyncio.Queue[str] = asyncio.Queue(MOST_HEARD)
        self._job: asyncio.Task[None] | None = None

    def hear(self, message: Opened | Heard) -> None:
        if isinstance(message, Opened):
            if self._job is None and self._cameras.converse is not None:
                self._job = asyncio.create_task(self._converse(self._cameras.converse))
            return
        with suppress(asyncio.QueueFull):  # who asks so much faster than answers come is not heard
            self._heard.put_nowait(message.text)

    async def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
            await asyncio.gather(self._job, return_exceptions=True)

    async def _converse(self, converse: Converse) -> None:
        channel = Channel(self._camera)
        try:
            conversation = converse(self._camera, channel)
            try:
                conversation.begin()
                while not channel.ended.is_set():
                    await conversation.handle(await self._heard.get())
            finally:
                await conversation.close()
        except Exception:
            log.exception("%s: a fault in the conversation over its data channel", self._camera.id)


def _take(camera: Camera, message: FromCamera, pixels: np.ndarray | None) -> None:
    """What the process of ``camera`` tells of frames."""
    now = time.monotonic()
    match message:
        case Picture():
            received = _past(message.received, now)
            captured = min(_past(message.captured, now), received)
            camera.session.put(
                Frame(seq=message.seq, pixels=pixels, luma=message.luma, captured=captured, received=received)
            )
            camera.came(0)
        case Tally():
            camera.tally(message.received, message.dropped)
        case Live():
            camera.what = message.what
        case Away():
            camera.state, camera.why = "away", message.why


def _unanswered(camera: Camera, answered: asyncio.Future[str]) -> None:
    """Nobody will answer the offer any more; who waits for it is told if it was not."""
    if not answered.done():
        answered.set_exception(MMServeError(f"the offer was not answered: {camera.why}"))


def _answering(camera: Camera) -> bool:
    """Whether somebody is being told about it at this moment."""
    answers: dict[str, int] = camera.session.stats().get("answers", {})
    return answers.get("running", 0) > 0


def _past(at: float, now: float) -> float:
    """A time that a camera's process tells, if it can be."""
    return min(max(at, now - OLDEST_S), now) if math.isfinite(at) else now


_NONE = Drop(0, 0, 0.0)
