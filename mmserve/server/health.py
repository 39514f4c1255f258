"""Liveness, and a readiness that is earned: one real picture must have gone through the model."""

import asyncio
import logging
import uuid

import numpy as np
from fastapi import APIRouter, Request

from mmserve.core.errors import MMServeError
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart
from mmserve.generation import Generator, whole
from mmserve.server.drain import Drain
from mmserve.server.errors import told

log = logging.getLogger("mmserve.server")
router = APIRouter()

PROBE_PIXELS = 64
PROBE_TOKENS = 2
RETRY_S = 5.0
LOOK_S = 0.1  # between two looks whether the engine has been started again


class NotReady(MMServeError):
    status = 503
    code = "not_ready"


class Readiness:
    """``proven`` is set once a probe has been answered for the first time. A probe proves the life of the
    engine that answered it; ``check`` tells what is missing."""

    def __init__(self, service: Generator, drain: Drain) -> None:
        self.service = service
        self.drain = drain
        self.proven = asyncio.Event()
        self._life = 0  # of the engine, that was proved
        self._why = "the first picture is still on its way through the model"

    async def watch(self) -> None:
        """Send a probe picture to each life of the engine, until it is answered; never returns."""
        while True:
            while self._life == self.service.lives or not self.service.ready:
                await asyncio.sleep(LOOK_S)
            await self._prove(self.service.lives)

    async def _prove(self, life: int) -> None:
        try:
            await whole(self.service, probe())
            self._life = life
            self.proven.set()
        except Exception as error:
            fault = None if isinstance(error, MMServeError) else error
            self._why = f"the probe picture failed: {told(error).message}"
            log.error("not ready: %s", self._why, exc_info=fault)
            await asyncio.sleep(RETRY_S)

    def check(self) -> None:
        """NotReady with the reason."""
        if self.drain.begun:
            raise NotReady("the server is stopping")
        if trouble := self.service.trouble:
            raise NotReady(trouble)
        if self._life != self.service.lives:
            raise NotReady(self._why)


def probe() -> ChatInput:
    """A small picture (a colour ramp) and a question with a very short answer."""
    ramp = np.linspace(0, 255, PROBE_PIXELS, dtype=np.uint8)
    pixels = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], ramp[None, ::-1]), axis=-1)
    message = Message("user", (ImagePart(pixels=np.ascontiguousarray(pixels)), TextPart("What is it?")))
    return ChatInput(
        request_id=f"probe-{uuid.uuid4().hex[:8]}",
        messages=(message,),
        sampling=SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True),
    )


@router.get("/health/live")
async def live() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/health/ready")
async def ready(request: Request) -> dict[str, str]:
    request.app.state.readiness.check()
    return {"status": "ready", "model": request.app.state.service.model_name}
