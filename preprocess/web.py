"""Media behind http and https URLs, fetched under one guard."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError, MediaTimeout, Overloaded
from mmserve.preprocess.address import FORBIDDEN, UNREACHABLE, AddressRule, default_port
from mmserve.preprocess.data_url import too_large

MAX_REDIRECTS = 5
MAX_ADDRESSES = 3  # of one host that are tried in turn
REDIRECTS = (301, 302, 303, 307, 308)
PLAIN = ("", "identity")
HEADERS = {"user-agent": "mmserve", "accept": "*/*", "accept-encoding": "identity"}


class Web:
    """Fetches URLs for one event loop; ``close`` it there.

    Every hop is looked up once, checked, and connected to by the number that was checked; its name is left
    where a server and its certificate are asked about it. A connection is never kept for a second request:
    the pool would hand it out by its number, and so to another name than the one its certificate proved.
    ``verify`` says which certificates are trusted, by default those of the public authorities.
    """

    def __init__(self, options: MediaOptions, *, verify: ssl.SSLContext | None = None) -> None:
        self.options = options
        self.rule = AddressRule.of(options)
        self._places = asyncio.Semaphore(options.max_fetches)
        self._client = httpx.AsyncClient(
            verify=verify or httpx.create_ssl_context(trust_env=False),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(min(options.fetch_timeout_s, options.fetch_idle_s)),
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch(self, url: str, limit: int) -> bytes:
        """The body of a 200 answer of at most ``limit`` bytes. MediaError, MediaTimeout or Overloaded."""
        if not self.options.fetch_urls:
            raise MediaError("fetching URLs is switched off; send the media as a data URL", code=FORBIDDEN)
        seconds = self.options.fetch_timeout_s
        async with self._place():
            try:
                async with asyncio.timeout(seconds):
                    return await self._follow(httpx.URL(url), limit)
            except TimeoutError:
                raise MediaTimeout(f"the URL did not answer in full within {seconds:g} s") from None
            except httpx.TimeoutException:
                raise MediaTimeout(f"the URL's host was silent for {self.options.fetch_idle_s:g} s") from None
            except httpx.ConnectError as error:
                raise MediaError(_connect_reason(error), code=UNREACHABLE) from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                said = f"the URL cannot be fetched: {type(error).__name__}"
                raise MediaError(said, code=UNREACHABLE) from None

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places for fetches at once; waiting for it has the time of one fetch."""
        try:
            async with asyncio.timeout(self.options.fetch_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise Overloaded(
                f"{self.options.max_fetches} URLs are being fetched, the most at once; try later"
            ) from None
        try:
            yield
        finally:
            self._places.release()

    @asynccontextmanager
    async def stream(self, url: str, auth: httpx.Auth | None = None) -> AsyncIterator[httpx.Response]:
        """The answer to a URL while it comes, for what has no end, under the same guard; its status is the
        caller's to look at. ``auth`` is shown to the URL's own server, and to none that it redirects to.

        MediaError, and what httpx raises.
        """
        if not self.options.fetch_urls:
            raise MediaError("fetching URLs is switched off", code=FORBIDDEN)
        async with self._followed(httpx.URL(url), auth) as answer:
            yield answer

    async def _follow(self, url: httpx.URL, limit: int) -> bytes:
        async with self._followed(url) as answer:
            return await _body(answer, limit)

    @asynccontextmanager
    async def _followed(
        self, url: httpx.URL, auth: httpx.Auth | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Follow redirects by hand: every hop is checked before anything is sent to it."""
        for _ in range(MAX_REDIRECTS + 1):
            async with self._asked(url, auth) as answer:
                if answer.status_code not in REDIRECTS:
                    yield answer
                    return
                url, auth = url.join(answer.headers.get("location", "")), None
        raise MediaError(f"the URL redirects more than {MAX_REDIRECTS} times", code=UNREACHABLE)

    @asynccontextmanager
    async def _asked(self, url: httpx.URL, auth: httpx.Auth | None) -> AsyncIterator[httpx.Response]:
        addresses, port = await self.rule.resolve(url)
        *others, last = addresses[:MAX_ADDRESSES]
        for address in others:
            try:
                answer = await self._send(url, address, port, auth)
                break
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue  # the next number of this host may answer
        else:
            answer = await self._send(url, last, port, auth)
        try:
            yield answer
        finally:
            await answer.aclose()

    async def _send(self, url: httpx.URL, address: str, port: int, auth: httpx.Auth | None) -> httpx.Response:
        request = self._client.build_request("GET", **_pinned(url, address, port))
        return await self._client.send(request, auth=auth, stream=True)


def _pinned(url: httpx.URL, address: str, port: int) -> dict[str, Any]:
    """A request for ``url`` that connects to ``address``, with the host's name where it is checked."""
    host = url.raw_host.decode("ascii")
    name = f"[{host}]" if ":" in host else host
    return {
        "url": url.copy_with(host=address, port=port, fragment=None),
        "headers": {**HEADERS, "host": name if port == default_port(url) else f"{name}:{port}"},
        "extensions": {"sni_hostname": host.removesuffix(".")},
    }


def _connect_reason(error: BaseException | None) -> str:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"the URL's host has no valid TLS certificate: {error.verify_message[:200]}"
        if isinstance(error, ssl.SSLError):
            return "the URL's host does not speak TLS"
        error = error.__cause__ or error.__context__
    return "the URL's host refuses the connection"


async def _body(answer: httpx.Response, limit: int) -> bytes:
    """The bytes as they come over the wire: what says it is compressed is refused, since it may unfold."""
    if answer.status_code != 200:
        raise MediaError(f"the URL answered with status {answer.status_code}", code=UNREACHABLE)
    if answer.headers.get("content-encoding", "").strip().lower() not in PLAIN:
        raise MediaError(
            "the URL answered with compressed content, which was not asked for", code=UNREACHABLE
        )
    length = answer.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large(limit)
    data = bytearray()
    async for chunk in answer.aiter_raw():
        data += chunk
        if len(data) > limit:
            raise too_large(limit)
    return bytes(data)
