"""The URL of a camera that is pulled: what may stand in it, and how it is shown without its secrets."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal, cast
from urllib.parse import quote, unquote, urlsplit

import httpx

from mmserve.core.config import CameraOptions, MediaOptions
from mmserve.core.errors import MediaError
from mmserve.preprocess.address import FORBIDDEN, UNREACHABLE, AddressRule
from mmserve.preprocess.source import find_file

Scheme = Literal["rtsp", "rtsps", "http", "https", "file"]
PORTS: dict[Scheme, int] = {"rtsp": 554, "rtsps": 322, "http": 80, "https": 443, "file": 0}
MOST_CHARS = 4096


@dataclass(frozen=True)
class CameraUrl:
    """``path`` begins with a slash and holds the query. ``user`` and ``password`` are as they are meant."""

    scheme: Scheme
    host: str
    port: int
    path: str
    user: str = ""
    password: str = ""

    @classmethod
    def read(cls, url: str) -> "CameraUrl":
        """MediaError, which repeats nothing of it, for what is no such URL."""
        try:
            parts = urlsplit(url.strip())
            scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
        except ValueError:
            raise MediaError("the camera's URL cannot be read", code=FORBIDDEN) from None
        if scheme not in PORTS or len(url) > MOST_CHARS or any(ord(c) < 33 for c in url.strip()):
            raise MediaError(
                "a camera is given as an rtsp://, rtsps://, http://, https:// or file:// URL", code=FORBIDDEN
            )
        kind = cast(Scheme, scheme)
        if not host and kind != "file":
            raise MediaError("the camera's URL has no host", code=FORBIDDEN)
        path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        return cls(
            kind,
            host,
            port or PORTS[kind],
            path,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )

    @property
    def shown(self) -> str:
        """Without user, password and query: any of them may be a secret."""
        if self.scheme == "file":
            return f"file://{self.path.partition('?')[0]}"
        query = "?***" if "?" in self.path else ""
        return (
            f"{self.scheme}://{'***@' if self.user else ''}{self._place}{self.path.partition('?')[0]}{query}"
        )

    @property
    def bare(self) -> str:
        """Without user and password."""
        return f"{self.scheme}://{self.host if self.scheme == 'file' else self._place}{self.path}"

    def at(self, host: str, port: int) -> str:
        """For FFmpeg: as plain RTSP, at another place."""
        user = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user else ""
        return f"rtsp://{user}{host}:{port}{self.path}"

    @property
    def auth(self) -> "Credentials | None":
        return Credentials(self.user, self.password) if self.user else None

    @property
    def _place(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


class Credentials(httpx.Auth):
    """A user's name and password, shown in the way that the server asks for: digest, or else basic."""

    def __init__(self, user: str, password: str) -> None:
        self._user, self._password = user, password

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        answer = yield request
        if answer.status_code != 401:
            return
        digest = answer.headers.get("www-authenticate", "").lower().startswith("digest")
        kind = httpx.DigestAuth if digest else httpx.BasicAuth
        flow = kind(self._user, self._password).auth_flow(request)
        first = next(flow)
        yield flow.send(answer) if digest else first


def media_for(options: MediaOptions, cameras: CameraOptions) -> MediaOptions:
    """The limits and addresses that hold for cameras: silence may last as long as theirs."""
    return replace(
        options,
        allow_private_urls=options.fetch_urls
        and (options.allow_private_urls or cameras.allow_private_cameras),
        fetch_idle_s=cameras.camera_idle_s,
        fetch_timeout_s=cameras.camera_idle_s,
    )


async def checked(url: CameraUrl, options: MediaOptions, cameras: CameraOptions) -> tuple[str, ...]:
    """The numeric addresses of a camera's host, none for a file. MediaError if it may not be pulled."""
    if url.scheme == "file":
        await asyncio.to_thread(find_file, url.bare, options)
        return ()
    if not options.fetch_urls:
        raise MediaError("fetching URLs is switched off, and pulling cameras from them too", code=FORBIDDEN)
    return await AddressRule.of(media_for(options, cameras)).numbers(url.host, url.port)


def may_come_back(error: MediaError) -> bool:
    """Whether what is wrong with a camera may pass by itself."""
    return error.code == UNREACHABLE
