"""Applications that are served beside the API, on the same port and for the same callers."""

from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from mmserve.server.errors import error_response, install, told
from mmserve.server.socket_door import check_origin

ANONYMOUS = "anonymous"  # who is let in without a key
SAFE = ("GET", "HEAD")


@dataclass(frozen=True)
class Extension:
    """``app`` answers everything below ``path`` (such as ``/placard``), and ``/`` leads there.

    It asks for an API key as the API does, but for reading paths of which ``is_open`` is true: they are as
    the application sees them, ``/`` being its own first page. Browsers show no header with the pages and
    pictures that they load by themselves: the key may stand in ``cookie`` (``key_cookie`` makes one), which
    counts below ``path`` alone, and for what changes something only if a page of this server asks for it.

    With a ``certificate`` (the files of chain and key) all of the server speaks TLS. ``ready`` is called with
    the server's URL when it has proved that it answers; it must not block. Where its pages ``show_cameras``
    by WebRTC, if that is installed, a process waits for the first of them from the start.
    """

    path: str
    app: ASGIApp
    is_open: Callable[[str], bool] = lambda path: False
    cookie: str | None = None
    certificate: tuple[Path, Path] | None = None
    ready: Callable[[str], None] = lambda url: None
    show_cameras: bool = False

    def opens(self, scope: Scope) -> bool:
        """Whether a request needs no key, since it reads what the application shows to everybody."""
        if scope["type"] != "http" or scope["method"] not in SAFE:
            return False
        path = scope["path"]
        if path in ("/", self.path):
            return True
        return bool(path.startswith(self.path + "/")) and self.is_open(path.removeprefix(self.path))

    def shown_key(self, scope: Scope) -> str | None:
        """The key in the cookie, where that counts."""
        if self.cookie is None or scope["type"] != "http" or not scope["path"].startswith(self.path + "/"):
            return None
        headers = Headers(scope=scope)
        if scope["method"] not in SAFE and not _own_page(headers):
            return None
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return None
        return unquote(found.value) if found is not None else None


def key_cookie(name: str, key: str, path: str, secure: bool) -> str:
    """The value of a ``set-cookie`` header, by which a browser shows ``key`` until it is closed."""
    secured = "; Secure" if secure else ""
    return f"{name}={quote(key, safe='')}; Path={path}; HttpOnly; SameSite=Strict{secured}"


def shows_key(request: Request) -> bool:
    """Whether a valid key came with ``request``; where none is needed nobody is known by one."""
    return bool(request.scope["owner"] != ANONYMOUS)


def check_page(request: Request) -> None:
    """OriginRefused for a page of another site that wants something changed here. Browsers tell it, and send
    such a page's forms without asking; other clients send no origin."""
    check_origin(request.scope, allowed=(), keyed=False)


def answer_errors(app: Starlette) -> None:
    """Have ``app`` answer every error as the API does; a fault of its own goes on to the log."""
    install(app)
    app.add_exception_handler(Exception, _on_fault)


def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(told(error))


def _own_page(headers: Headers) -> bool:
    return urlsplit(headers.get("origin", "")).netloc == headers.get("host", "")
