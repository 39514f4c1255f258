"""``AnswerEngine`` as processes: one runs the engine, one makes text."""

from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from mmserve.answer import Said
from mmserve.answering import PixelsAgain, carried, conversation
from mmserve.core.arena import Arena
from mmserve.core.config import Config
from mmserve.core.messages import CarryOver, PreparedRequest
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.processes.supervisor import Supervisor


class RemoteEngine:
    """The processes start when it is made; pixels reach them by ``arena``.

    When one ends, what runs fails with EngineRestarting, and it is started again.
    """

    def __init__(self, config: Config, spec: ProcessorSpec, arena: Arena) -> None:
        self._supervisor = Supervisor(config, spec, arena)
        self._client = self._supervisor.client

    def wait_ready(self) -> None:
        """Return when requests are answered; MMServeError, of the process that cannot start, if never."""
        self._supervisor.started.result()

    @property
    def trouble(self) -> str | None:
        return self._supervisor.trouble

    @property
    def lives(self) -> int:
        return self._supervisor.lives

    @property
    def failed(self) -> Future[str]:
        return self._supervisor.failed

    async def answer(self, request: PreparedRequest, pixels: PixelsAgain) -> AsyncGenerator[Said, None]:
        async with aclosing(conversation(self._client, request, pixels)) as answer:
            del request
            async for said in answer:
                if said.early:
                    await answer.aclose()
                yield said

    async def carry_over(self, order: CarryOver) -> int:
        return await carried(self._client, order)

    def holds(self, digest: bytes) -> bool:
        return self._client.holds(digest)

    def stats(self) -> dict[str, Any]:
        return {**self._client.stats(), "process_restarts": self._supervisor.restarts}

    def stop(self) -> None:
        self._supervisor.stop()
