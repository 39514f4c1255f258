"""The body of an HTTP answer as a file that PyAV can read, for as long as it comes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import httpx

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.live.sources.url import CameraUrl
from mmserve.preprocess.address import FORBIDDEN, UNREACHABLE
from mmserve.preprocess.web import PLAIN, Web

T = TypeVar("T")
FINAL = (400, 401, 403, 404, 405, 410)  # asking again would be answered alike


class Download:
    """Connected when it is made, under the guard of ``Web``; ``close`` it. For one thread.

    ``kind`` is the declared content type. ``ends`` tells whether the answer has a length, as a file has.
    """

    def __init__(self, url: CameraUrl, options: MediaOptions) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="web", daemon=True).start()
        self._open = AsyncExitStack()
        self._rest = memoryview(b"")
        try:
            answer = self._run(self._ask(url, options))
            _check(answer)
        except BaseException:
            self.close()
            raise
        self.kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.ends = answer.headers.get("content-length", "").isdecimal()
        self._parts: AsyncIterator[bytes] = answer.aiter_raw()

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end. MediaError when it breaks off or is silent."""
        if not self._rest:
            self._rest = memoryview(self._run(self._next()))
        part, self._rest = self._rest[:size], self._rest[size:]
        return bytes(part)

    def close(self) -> None:
        self._run(self._open.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _ask(self, url: CameraUrl, options: MediaOptions) -> httpx.Response:
        web = Web(options)
        self._open.push_async_callback(web.close)
        with _telling():
            return await self._open.enter_async_context(web.stream(url.bare, url.auth))

    async def _next(self) -> bytes:
        with _telling():
            return await anext(self._parts, b"")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _telling:
    """What httpx raises, in words that hold nothing of the URL."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.TimeoutException):
            raise MediaError("the camera's host was silent", code=UNREACHABLE) from None
        if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
            said = f"the camera cannot be read: {type(error).__name__}"
            raise MediaError(said, code=UNREACHABLE) from None


def _check(answer: httpx.Response) -> None:
    status = answer.status_code
    if status != 200:
        code = FORBIDDEN if status in FINAL else UNREACHABLE
        raise MediaError(f"the camera answered with status {status}", code=code)
    if answer.headers.get("content-encoding", "").strip().lower() not in PLAIN:
        raise MediaError(
            "the camera answered with compressed content, which was not asked for", code=FORBIDDEN
        )
