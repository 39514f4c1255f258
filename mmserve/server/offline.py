"""Requests that come from a file, answered by the endpoints' own jobs: they get what a client gets."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mmserve.batch_files import GOOD, Line
from mmserve.chat_format import MediaRef
from mmserve.core.config import Config
from mmserve.core.errors import EngineDead, InvalidRequest, MediaError, MMServeError, Overloaded, WorkersDead
from mmserve.media import MediaDesk
from mmserve.preprocess.source import Content
from mmserve.server.chat import ChatJob
from mmserve.server.completions import CompletionJob, CompletionRequest
from mmserve.server.errors import error_body, told
from mmserve.server.models import check_model
from mmserve.server.protocol import ChatRequest, decode
from mmserve.server.tokenize import Tokenizing

log = logging.getLogger("mmserve.batch")

OWNER = "batch"
ATTEMPTS = 120  # while others leave no room
RETRY_S = 0.5
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class LocalDesk(MediaDesk):
    """Also takes paths, and file URLs that are relative: they begin at the media root."""

    async def fetch(self, ref: MediaRef) -> Content:
        assert ref.source is not None, "a reference with nothing to fetch"
        return await super().fetch(replace(ref, source=self._located(ref.source, ref.param)))

    def _located(self, source: str, param: str) -> str:
        path = _relative_path(source)
        if path is None:
            return source
        root = self.options.media_root
        if root is None:
            raise MediaError(f"{param}: a path needs the folder that it may be in (media_root)", param=param)
        try:
            return (Path(root).resolve() / path).as_uri()
        except ValueError:  # a path that no file system has
            raise MediaError(f"{param}: this is no path and no URL", param=param) from None


def _relative_path(source: str) -> str | None:
    """The path that ``source`` is, or that stands in it as a relative file URL; None for any other URL."""
    scheme = _SCHEME.match(source.strip())
    if scheme is None:
        return source.strip()
    if scheme[0].lower() != "file:":
        return None
    parts = urlsplit(source.strip())
    path = unquote(parts.path if parts.netloc.lower() in ("", "localhost") else parts.netloc + parts.path)
    return None if path.startswith("/") else path


class Answerer:
    """Answers lines of a batch, any number at once; ``close`` it on the same event loop."""

    def __init__(self, service: Tokenizing, config: Config) -> None:
        self.service = service
        self.config = config
        self.desk = LocalDesk(config.media, service.library, service.metrics)

    async def answer(self, line: Line) -> dict[str, Any]:
        """A line of the answer file. EngineDead or WorkersDead are raised: nothing more can be answered."""
        status, body = await self._response(line)
        response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }

    async def close(self) -> None:
        await self.desk.close()

    async def _response(self, line: Line) -> tuple[int, dict[str, Any]]:
        try:
            return GOOD, await self._patiently(ENDPOINTS[line.url], bytes(line.body))
        except (EngineDead, WorkersDead):
            raise
        except Exception as error:
            if not isinstance(error, MMServeError):
                log.exception("%s failed", line.custom_id)
            known = told(error)
            return known.status, error_body(known)

    async def _patiently(self, endpoint: "Endpoint", body: bytes) -> dict[str, Any]:
        for _ in range(ATTEMPTS - 1):
            try:
                return await endpoint(self, body)
            except Overloaded:
                await asyncio.sleep(RETRY_S)
        return await endpoint(self, body)

    async def chat(self, body: bytes) -> dict[str, Any]:
        wanted = decode(body, ChatRequest)
        self._check(wanted)
        wanted.check()
        return await ChatJob(self.service, self.desk, wanted, OWNER, time.monotonic()).complete()

    async def completion(self, body: bytes) -> dict[str, Any]:
        wanted = decode(body, CompletionRequest)
        self._check(wanted)
        wanted.check()
        most = self.config.scheduler.max_waiting
        return await CompletionJob(self.service, wanted, most, OWNER, time.monotonic()).complete()

    def _check(self, wanted: ChatRequest | CompletionRequest) -> None:
        check_model(self.service, wanted.model)
        if wanted.stream:
            raise InvalidRequest("a batch has no streams; leave out stream", param="stream")


Endpoint = Callable[[Answerer, bytes], Awaitable[dict[str, Any]]]
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": Answerer.chat,
    "/v1/completions": Answerer.completion,
}
