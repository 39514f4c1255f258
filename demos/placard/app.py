"""What the placard serves below /placard: its page, what the page has to know, and the labels that are kept.

It knows the server's model by name and its callers by the door's word. What is written about a picture is
asked of the API by the page itself, as any other client would.
"""

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.demos.placard import pages
from mmserve.demos.placard.counts import Counts, Pace, TooMany
from mmserve.demos.placard.incoming import Counted, Described, sent, sent_label
from mmserve.demos.placard.options import PlacardOptions
from mmserve.demos.placard.settings import Host, Settings
from mmserve.demos.placard.store import MOST_A_PAGE, Saved, Store
from mmserve.errors import InvalidRequest, NotFound
from mmserve.extension import Extension, answer_errors, check_page, key_cookie, shows_key
from mmserve.server.errors import error_response

STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}
COOKIE = "placard_key"
PAGE = 24  # labels of the gallery at once
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; style-src 'self';"
        " script-src 'self'; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self';"
        " frame-ancestors 'none'"
    ),
    "permissions-policy": "camera=(self), microphone=(), geolocation=(), screen-wake-lock=(self)",
    # With no-referrer browsers would not tell the origin of forms, by which those of other sites are known.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class SavingOff(InvalidRequest):
    status = 403
    code = "saving_off"


def create_placard(options: PlacardOptions, store: Store, host: Host, counts: Counts) -> Extension:
    """The placard as an application beside the API; ``store`` has been prepared, unless nothing is saved."""
    placard = Placard(options, store, host, counts)
    return Extension(path=pages.ROOT, app=placard.app(), is_open=_is_open, cookie=COOKIE)


class Placard:
    def __init__(self, options: PlacardOptions, store: Store, host: Host, counts: Counts) -> None:
        self.options, self.store, self.host, self.counts = options, store, host, counts
        self.settings = Settings(options, host)
        self.pace = Pace(options.max_labels_per_min)
        self.files = {path.relative_to(STATIC).as_posix(): path for path in _shipped(STATIC)}

    def app(self) -> ASGIApp:
        app = Starlette(
            routes=[
                Route("/", self.page),
                Route("/static/{name:path}", self.static),
                Route("/setup.json", self.setup),
                Route("/form", self.form, methods=["POST"]),
                Route("/key", self.key, methods=["POST"]),
                Route("/counts", self.told, methods=["GET"]),
                Route("/counts", self.count, methods=["POST"]),
                Route("/gallery", self.gallery),
                Route("/labels", self.listed, methods=["GET"]),
                Route("/labels", self.save, methods=["POST"]),
                Route("/labels/{name}", self.label, methods=["GET"]),
                Route("/labels/{name}", self.delete, methods=["DELETE"]),
                Route("/labels/{name}/delete", self.delete_by_form, methods=["POST"]),
            ]
        )
        answer_errors(app)
        return Headed(app)

    # ------------------------------------------------------------ the page

    async def page(self, request: Request) -> Response:
        return self._file("index.html")

    async def static(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in self.files:
            raise NotFound(f"there is no {name[:100]!r} here")
        path = self.files[name]
        return FileResponse(path, media_type=KINDS[path.suffix])

    async def setup(self, request: Request) -> Response:
        return _json(self.settings.body(datetime.now()))

    async def form(self, request: Request) -> Response:
        """The form of a label about what the model has described already."""
        told = await sent(request, Described)
        return _json({"schema": self.settings.form(told.alt_text, told.language)})

    async def key(self, request: Request) -> Response:
        """Have the browser show the key that came in the header with what it loads by itself, too."""
        check_page(request)
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise InvalidRequest("show the key as 'Authorization: Bearer KEY'", param="authorization")
        cookie = key_cookie(COOKIE, key.strip(), pages.ROOT, request.url.scheme == "https")
        return Response(status_code=204, headers={"set-cookie": cookie})

    # ------------------------------------------------------------ counts

    async def told(self, request: Request) -> Response:
        return _json(self.counts.body())

    async def count(self, request: Request) -> Response:
        check_page(request)
        self.counts.add(**msgspec.structs.asdict(await sent(request, Counted)))
        return Response(status_code=204)

    # ------------------------------------------------------------ labels

    async def save(self, request: Request) -> Response:
        check_page(request)
        if self.options.saving == "off":
            raise SavingOff("this placard keeps nothing: it runs with saving off")
        saved, image = await sent_label(request, self.host.model)
        try:
            self.pace.take(time.monotonic())
        except TooMany as error:
            self.counts.add(refused=1)
            return error_response(error, {"retry-after": str(int(error.wait_s) + 1)})
        await asyncio.to_thread(self.store.save, saved, image)
        self.counts.add(saved=1)
        return _json(_body(saved), 201, {"location": f"{pages.ROOT}/labels/{saved.id}"})

    async def listed(self, request: Request) -> Response:
        limit = _number(request, "limit")
        limit = PAGE if limit is None else limit
        if not 1 <= limit <= MOST_A_PAGE:
            raise InvalidRequest(f"limit must be from 1 to {MOST_A_PAGE}, not {limit}", param="limit")
        found, following = await asyncio.to_thread(self.store.page, limit, _number(request, "before"))
        next_page = None if following is None else str(following)
        return _json({"labels": [_body(saved) for saved in found], "next": next_page})

    async def label(self, request: Request) -> Response:
        """``ID`` is a page, ``ID.json`` the label, ``ID.jpg`` its picture, ``ID.svg`` the page's QR code."""
        name, _, kind = request.path_params["name"].partition(".")
        if kind == "":
            return await self._permalink(request, name)
        if kind == "jpg":
            return Response(await asyncio.to_thread(self.store.image, name), media_type="image/jpeg")
        saved = await asyncio.to_thread(self.store.get, name)
        if kind == "json":
            return _json(_body(saved))
        if kind == "svg":
            return Response(pages.code(self._address(request, name)), media_type="image/svg+xml")
        raise NotFound(f"a label is there as a page, .json, .jpg and .svg, not .{kind[:20]}")

    async def _permalink(self, request: Request, name: str) -> Response:
        if self._must_show_key(request):
            return self._to_the_key(request)
        language = self._reads(request)
        try:
            saved = await asyncio.to_thread(self.store.get, name)
        except NotFound:
            return HTMLResponse(pages.missing(language), 404)
        return HTMLResponse(pages.permalink(saved, self._address(request, name), language))

    async def delete(self, request: Request) -> Response:
        check_page(request)
        await asyncio.to_thread(self.store.delete, request.path_params["name"])
        return Response(status_code=204)

    async def delete_by_form(self, request: Request) -> Response:
        await self.delete(request)
        return RedirectResponse(f"{pages.ROOT}/gallery", 303)

    async def gallery(self, request: Request) -> Response:
        if self._must_show_key(request):
            return self._to_the_key(request)
        before = _number(request, "before")
        found, following = await asyncio.to_thread(self.store.page, PAGE, before)
        return HTMLResponse(pages.gallery(found, following, before is None, self._reads(request)))

    def _must_show_key(self, request: Request) -> bool:
        """Whether a page that the door let through shows what is for those with a key alone."""
        return self.host.keyed and not shows_key(request)

    def _to_the_key(self, request: Request) -> Response:
        """To the page that asks for a key, and leads back here."""
        return RedirectResponse(f"{pages.ROOT}/?next={request.url.path}", 303)

    def _reads(self, request: Request) -> str:
        """The language of whoever reads."""
        return pages.language_of(request.headers.get("accept-language", ""), self.options.language)

    def _address(self, request: Request, name: str) -> str:
        base = self.options.public_url or f"{request.url.scheme}://{request.url.netloc}"
        return f"{base.rstrip('/')}{pages.ROOT}/labels/{name}"


class Headed:
    """ASGI middleware: what every answer tells browsers beside itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, headed)


def _is_open(path: str) -> bool:
    """What needs no key: the page, which asks for it, its files, and pages that lead there without one."""
    return path in ("/", "/gallery") or path.startswith("/static/") or _is_permalink(path)


def _is_permalink(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder == "/labels" and "." not in name


def _shipped(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix in KINDS]


def _body(saved: Saved) -> dict[str, Any]:
    path = f"{pages.ROOT}/labels/{saved.id}"
    told = {name: getattr(saved, name) for name in saved.__dataclass_fields__ if name != "label"}
    urls = {"url": path, "image_url": f"{path}.jpg", "qr_url": f"{path}.svg"}
    return {**told, **urls, "label": msgspec.structs.asdict(saved.label)}


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 18):
        raise InvalidRequest(f"{name} must be a number that was given here, not {text[:40]!r}", param=name)
    return int(text)
