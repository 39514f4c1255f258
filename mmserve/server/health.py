"""Liveness, and a readiness that is earned: one real picture must have gone through the model."""

import asyncio
import logging
import uuid

import numpy as np
from fastapi import APIRouter, Request

from mmserve.core.errors import MMServeError
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart
from mmserve.generation import Generator, whole
from mmserve.server.errors import told

log = logging.getLogger("mmserve.server")
router = APIRouter()

PROBE_PIXELS = 64
PROBE_TOKENS = 2
RETRY_S = 5.0


class NotReady(MMServeError):
    status = 503
    code = "not_ready"


class Readiness:
    """``proven`` is set once the probe has been answered; until then ``why`` tells what is missing."""

    def __init__(self, service: Generator) -> None:
        self.service = service
        self.proven = asyncio.Event()
        self.why = "the first picture is still on its way through the model"

    async def prove(self) -> None:
        """Send the probe picture until it is answered."""
        while not self.proven.is_set():
            try:
                await whole(self.service, probe())
                self.proven.set()
            except Exception as error:
                fault = None if isinstance(error, MMServeError) else error
                self.why = f"the probe picture failed: {told(error).message}"
                log.error("not ready: %s", self.why, exc_info=fault)
                await asyncio.sleep(RETRY_S)

    def check(self) -> None:
        if not self.proven.is_set():
            raise NotReady(self.why)
        if not self.service.ready:
            raise NotReady("the engine does not run")


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
