"""What pages send: a label with its picture, counts, and descriptions; each is checked, and bounded."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.types import Message

from mmserve.demos.placard import tiny
from mmserve.demos.placard.counts import MOST_AT_ONCE
from mmserve.demos.placard.jpeg import cleaned
from mmserve.demos.placard.labels import LANGUAGES, VOICES, Label
from mmserve.demos.placard.store import Saved, new_id
from mmserve.errors import InvalidRequest, PayloadTooLarge

MOST_IMAGE = 4 << 20  # bytes
MOST_FORM = MOST_IMAGE + (64 << 10)
MOST_JSON = 8192
MOST_DESCRIBED = 1000  # characters
VOICE_IDS = (tiny.VOICE.id, *(voice.id for voice in VOICES))
LANGUAGE_IDS = tuple(language.id for language in LANGUAGES)
T = TypeVar("T")


class Counted(Struct, forbid_unknown_fields=True):
    """What a page has to report since it last did."""

    looked: int = 0
    written: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= count <= MOST_AT_ONCE for count in (self.looked, self.written, self.refused)):
            raise ValueError(f"a count must be from 0 to {MOST_AT_ONCE}")


class Described(Struct, forbid_unknown_fields=True):
    """What the model says is to be seen."""

    alt_text: str
    language: str = "en"

    def __post_init__(self) -> None:
        if len(self.alt_text) > MOST_DESCRIBED:
            raise ValueError(f"alt_text must have at most {MOST_DESCRIBED} characters")


async def sent(request: Request, kind: type[T]) -> T:
    """The JSON of a body. InvalidRequest says what is wrong with it."""
    return _decoded(await _within(request, MOST_JSON).body(), kind, "body")


async def sent_label(request: Request, model: str) -> tuple[Saved, bytes]:
    """The label of a form, as it is to be kept under a new id, and its picture without a camera's notes.

    InvalidRequest names the field that is wrong; PayloadTooLarge comes before more than the limit is read.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MOST_FORM:
        raise _too_large()
    async with _within(request, MOST_FORM).form() as form:
        return await _read(form, model)


async def _read(form: FormData, model: str) -> tuple[Saved, bytes]:
    image = form.get("image")
    if not isinstance(image, UploadFile):
        raise InvalidRequest("the form has no file 'image'", param="image")
    data = await image.read(MOST_IMAGE + 1)
    if len(data) > MOST_IMAGE:
        raise _too_large()
    picture, now = cleaned(data), datetime.now(UTC)
    saved = Saved(
        id=new_id(),
        label=_decoded(_text(form, "label").encode(), Label, "label"),
        voice=_one_of(form, "voice", VOICE_IDS),
        language=_one_of(form, "language", LANGUAGE_IDS),
        model=model,
        seen_at=_moment(_text(form, "seen_at")) if "seen_at" in form else _iso(now),
        saved_at=_iso(now),
        width=picture.size[0],
        height=picture.size[1],
    )
    return saved, picture.data


def _decoded(data: bytes, kind: type[T], param: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def _text(form: FormData, name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"the form has no field {name!r}", param=name)
    return value


def _one_of(form: FormData, name: str, allowed: tuple[str, ...]) -> str:
    value = _text(form, name)
    if value not in allowed:
        raise InvalidRequest(f"{name} must be one of {', '.join(allowed)}, not {value[:40]!r}", param=name)
    return value


def _moment(text: str) -> str:
    try:
        return _iso(datetime.fromisoformat(text).astimezone(UTC))
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"seen_at must be a moment like 2026-12-01T09:30:00Z, not {text[:40]!r}", param="seen_at"
        ) from None


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def _within(request: Request, most: int) -> Request:
    """The same request; PayloadTooLarge as soon as its body is larger than ``most`` bytes."""
    received = 0
    plain: Callable[[], Awaitable[Message]] = request.receive

    async def receive() -> Message:
        nonlocal received
        message = await plain()
        received += len(message.get("body", b""))
        if received > most:
            raise _too_large()
        return message

    return Request(request.scope, receive)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"a picture that is kept has at most {MOST_IMAGE} bytes", param="image")
