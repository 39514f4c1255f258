"""One picture or clip that comes with a request: a form's file, the raw body, or named in JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import FormData, UploadFile

from mmserve.chat_format import Loaded, MediaRef, build_part, open_source
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ImagePart, VideoPart
from mmserve.media import MediaDesk, kind_of
from mmserve.media_options import Kind, Options, merged, read_options
from mmserve.preprocess.source import Content
from mmserve.server.errors import UnsupportedMediaType
from mmserve.server.protocol import Body, MediaFields, convert, read_json

FILES = ("image", "video", "file")
SOURCES = ("image_url", "image", "video_url", "video", "media_id")


@dataclass(frozen=True)
class Incoming:
    """A body's plain fields, and the file that came with them under its name.

    Not ``strict`` are the fields of a form or a query, which are all text.
    """

    fields: Mapping[str, Any]
    name: str = ""
    data: bytes | None = None
    strict: bool = True

    def read(self, kind: type[Body]) -> Body:
        """The fields as a ``kind``; InvalidRequest names the one that is wrong."""
        return convert(self.fields, kind, strict=self.strict)


@dataclass(frozen=True)
class Sent:
    """The picture or clip of a request, and what is asked of it."""

    data: Content
    kind: Kind
    options: Options = field(default_factory=dict)
    param: str = ""

    def part(self) -> ImagePart | VideoPart:
        return build_part(Loaded(self.data), self.kind, self.options, self.param)


async def incoming(request: Request) -> Incoming:
    """The body of ``request``; beside a raw picture the query holds the fields. An empty file is an error."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with request.form() as form:
            return await _of_form(form)
    if kind.startswith(("image/", "video/")) or kind == "application/octet-stream":
        data = _filled(await request.body(), "body")
        return Incoming(dict(request.query_params), "body", data, strict=False)
    if kind and "json" not in kind:
        raise UnsupportedMediaType(
            "send multipart/form-data with an 'image' file, JSON with an image_url, "
            f"or the picture itself as image/*; not {kind[:100]}"
        )
    return Incoming(await read_json(request, dict[str, Any]))


async def sent(body: Incoming, desk: MediaDesk, owner: str) -> Sent:
    """The one picture or clip of ``body``. What a video field holds is a clip, even a GIF; elsewhere the
    file itself tells."""
    wanted = body.read(MediaFields)
    given = [name for name in SOURCES if getattr(wanted, name) is not None]
    if body.data is not None and given:
        raise InvalidRequest("give one picture or clip, not several", param=body.name)
    if body.data is not None:
        return _told(Loaded(body.data), {}, wanted, body.name)
    if len(given) != 1:
        raise InvalidRequest(
            f"give one picture or clip: a file 'image', or one of {', '.join(SOURCES)}; not {len(given)}",
            param=given[1] if given else "image",
        )
    return await _named(given[0], wanted, desk, owner)


async def _named(name: str, wanted: MediaFields, desk: MediaDesk, owner: str) -> Sent:
    held = open_source(name, _as_url(name, getattr(wanted, name)), name)
    source = held.source
    if source is not None and not isinstance(source, str):
        raise InvalidRequest(f"{name} must be a URL or base64 data", param=name)
    kind: Kind | None = None if name == "media_id" else _declared(name) or "image"
    ref = MediaRef(kind, source, name, media_id=held.media_id)
    if source is None and held.media_id is None:
        raise InvalidRequest(f"{name} has no url", param=name)
    return _told((await desk.find([ref], owner))[name], held.options, wanted, name)


def _told(loaded: Loaded, inner: Mapping[str, Any], wanted: MediaFields, name: str) -> Sent:
    """With the options from all the places where they may stand, the nearest first."""
    kind = loaded.kind or _declared(name) or kind_of(loaded.data)
    beside = {n: v for n, v in msgspec.structs.asdict(wanted).items() if n not in SOURCES}
    options = merged(read_options(inner, kind, name), read_options(beside, kind, ""), loaded.options)
    return Sent(loaded.data, kind, options, name)


def _declared(name: str) -> Kind | None:
    return "video" if name.startswith("video") else None


def _as_url(name: str, value: Any) -> Any:
    """A bare string of base64 becomes a data URL."""
    if name not in ("image", "video") or value.startswith("data:") or "://" in value[:16]:
        return value
    return f"data:application/octet-stream;base64,{value}"


async def _of_form(form: FormData) -> Incoming:
    files = [(k, v) for k, v in form.multi_items() if isinstance(v, UploadFile) and k in FILES]
    fields = {k: _plain(k, v) for k, v in form.multi_items() if isinstance(v, str)}
    if len(files) > 1:
        raise InvalidRequest("give one picture or clip, not several", param=files[-1][0])
    if not files:
        return Incoming(fields, strict=False)
    [(name, file)] = files
    return Incoming(fields, name, _filled(await file.read(), name), strict=False)


def _plain(name: str, text: str) -> Any:
    """A form has texts alone; those of lists are JSON."""
    if name not in ("rgba_background_color", "timestamps", "include"):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _filled(data: bytes, name: str) -> bytes:
    if not data:
        raise InvalidRequest(f"{name} is empty; send the bytes of a picture or clip", param=name)
    return data
