"""OpenAI-shaped conversations, checked and turned into ``core.messages.Message``.

Media named by a URL, a path, an id or a uuid is bytes that somebody has to find. Parsing and finding are
apart, so that a server can find all of a request's media at once, on its own loop and by its own rules::

    refs = media_refs(messages)
    found = dict(zip(refs, await asyncio.gather(*map(find, refs))))
    parsed = parse_messages(messages, found.__getitem__)

What a source string may be (data URL, http, a file) is the loader's decision alone. Which options a part
takes, and which of several holds, is told in ``media_options``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ImagePart, Message, Part, TextPart, VideoPart
from mmserve.media_options import Kind, Options, check_together, inside, merged, read_options, shown
from mmserve.parsing.calls import template_calls

MOST_ENTRIES = 8192  # messages of a conversation, parts of a message
ROLES = {"system", "developer", "user", "assistant", "tool"}
TEXTS = ("text", "input_text", "output_text")
LONGEST_NAME = 256  # characters of a uuid or an id
WHITE = (255, 255, 255)
# Beside a part's media. What has been sent is kept by its content, so a hint to keep it has nothing to add.
_BESIDE = ("type", "uuid", "cache_control")


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Media that must be found: ``source`` as the caller wrote it, ``param`` where it stood.

    ``kind`` is None where what is stored decides. Without a source there is a ``media_id`` (of POST
    /v1/media) or a ``uuid``, the caller's own name for bytes sent before; with one, the uuid names it from
    now on. ``frame`` is the number of a picture in a clip given as a list.
    """

    kind: Kind | None
    source: str | None
    param: str
    uuid: str | None = None
    media_id: str | None = None
    frame: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found: a file, or a clip's pictures; of what was stored also its kind and its options."""

    data: bytes | tuple[bytes, ...]
    kind: Kind | None = None
    options: Options = field(default_factory=dict)


Loader = Callable[[MediaRef], Loaded]


def media_refs(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> tuple[MediaRef, ...]:
    """The media of ``messages`` that must be found, in order; InvalidRequest if a message is malformed."""
    refs: list[MediaRef] = []

    def record(ref: MediaRef) -> Loaded:
        refs.append(ref)
        return Loaded(b"")

    parse_messages(messages, record, param)
    return tuple(refs)


def parse_messages(
    messages: Sequence[Mapping[str, Any]],
    loader: Loader,
    param: str = "messages",
    defaults: Mapping[Kind, Options] | None = None,
) -> tuple[Message, ...]:
    """Messages of a conversation. ``loader`` finds each ``MediaRef``; ``defaults`` are the request's options.

    Content is a string or a list of parts: texts (``text``, ``input_text``), ``image_url`` and ``video_url``
    as OpenAI has them, ``input_image``, ``input_video``, ``media``, and ``{"type": "image", "image": X}`` or
    ``{"type": "video", "video": X}`` where X is a source string, a path, encoded bytes, a PIL picture, or a
    uint8 array (frames ``[F, H, W, 3]`` or a list for video).
    InvalidRequest names the field, e.g. ``messages[1].content[0].image_url``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(f"{param} must be a list with at least one message", param=param)
    check_length(messages, "messages", param)
    parser = _Parser(loader, defaults or {})
    return tuple(parser.message(m, f"{param}[{i}]") for i, m in enumerate(messages))


def check_length(given: Sequence[Any], what: str, param: str) -> None:
    """InvalidRequest for more messages or parts than one request may have: reading them takes the server's
    own time, of which there is one for everybody."""
    if len(given) > MOST_ENTRIES:
        raise InvalidRequest(
            f"{param} has {len(given)} {what}; at most {MOST_ENTRIES} are allowed", param=param
        )


def build_part(loaded: Loaded, kind: Kind, options: Options, where: str) -> ImagePart | VideoPart:
    """The part for what was found, as a ``kind``; ``where`` it stood is its ``param``."""
    check_together(options, where)
    if kind == "image":
        return ImagePart(data=loaded.data, param=where, **options)  # type: ignore[arg-type]
    if isinstance(loaded.data, tuple):
        return VideoPart(pictures=loaded.data, param=where, **options)
    return VideoPart(data=loaded.data, param=where, **options)


def open_source(name: str, value: Any, where: str) -> "Held":
    """What the field ``name`` of a part or a body holds; InvalidRequest if that can be no media."""
    return _OPENERS[name](value, where)


# ---------------------------------------------------------------- where a part's media stands


@dataclass(frozen=True)
class Form:
    """A type of part: what its media is, and the fields of which one holds it."""

    kind: Kind | None
    fields: tuple[str, ...]


FORMS = {
    "image_url": Form("image", ("image_url",)),
    "input_image": Form("image", ("image_url", "file_id")),
    "image": Form("image", ("image", "url")),
    "video_url": Form("video", ("video_url",)),
    "input_video": Form("video", ("input_video", "video_url", "file_id")),
    "video": Form("video", ("video", "url")),
    "media": Form(None, ("media_id",)),
}


@dataclass(frozen=True)
class Held:
    """What a field holds: a source (a string, or Python objects of the offline API) or an id, and options."""

    source: Any = None
    media_id: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class _Parser:
    """Turns messages and parts into those of ``core.messages``; ``param`` is always where it stands."""

    def __init__(self, loader: Loader, defaults: Mapping[Kind, Options]) -> None:
        self.loader = loader
        self.defaults = defaults

    def message(self, message: Any, param: str) -> Message:
        fields = _mapping(message, param)
        role = fields.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidRequest(
                f"{param}.role must be one of {', '.join(sorted(ROLES))}, not {shown(role)}",
                param=f"{param}.role",
            )
        extra = {k: v for k, v in fields.items() if k not in ("role", "content") and v is not None}
        if "tool_calls" in extra:
            extra["tool_calls"] = template_calls(extra["tool_calls"], f"{param}.tool_calls")
        content = self._content(fields.get("content"), bool(extra.get("tool_calls")), f"{param}.content")
        return Message("system" if role == "developer" else role, content, extra)

    def _content(self, content: Any, may_be_empty: bool, param: str) -> tuple[Part, ...]:
        if content is None and may_be_empty:
            return ()
        if isinstance(content, str):
            return (TextPart(content),)
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise InvalidRequest(f"{param} must be a string or a list of parts", param=param)
        check_length(content, "parts", param)
        return tuple(self._part(p, f"{param}[{i}]") for i, p in enumerate(content))

    def _part(self, part: Any, param: str) -> Part:
        if isinstance(part, str):
            return TextPart(part)
        fields = _mapping(part, param)
        kind = fields.get("type")
        if isinstance(kind, str) and kind in TEXTS:
            return _text(fields, f"{param}.text")
        if not isinstance(kind, str) or kind not in FORMS:
            raise InvalidRequest(
                f"{param}.type must be one of {', '.join((*TEXTS, *FORMS))}, not {shown(kind)}",
                param=f"{param}.type",
            )
        return self.media(fields, FORMS[kind], param)

    def media(self, fields: Mapping[str, Any], form: Form, param: str) -> ImagePart | VideoPart:
        """A picture or clip in ``fields``, by the rules of its ``form``."""
        name = _holder(fields, form, param)
        where = inside(param, name)
        uuid = _name(fields.get("uuid"), inside(param, "uuid"))
        held = open_source(name, fields.get(name), where)
        if held.source is None and held.media_id is None and uuid is None:
            raise InvalidRequest(f"{where} is missing", param=where)
        loaded, pixels = self._found(held, form.kind, uuid, where)
        kind = form.kind or loaded.kind
        if kind is None:  # recorded only: which options fit is known when it has been found
            return ImagePart(param=where)
        options = merged(
            read_options(held.options, kind, where),
            read_options(fields, kind, param, also=(*form.fields, *_BESIDE)),
            loaded.options,
            self.defaults.get(kind, {}),
        )
        if pixels is None:
            return build_part(loaded, kind, options, where)
        check_together(options, where)
        if kind == "video":
            return VideoPart(frames=_frames(pixels, where), param=where, **options)
        background = options.pop("background", WHITE)
        return ImagePart(pixels=_pixels(pixels, where, background), param=where, **options)

    def _found(self, held: Held, kind: Kind | None, uuid: str | None, where: str) -> tuple[Loaded, Any]:
        """What was found for a reference, or the pixels that stand in its place."""
        source = held.source
        if source is None or isinstance(source, str | Path):
            text = None if source is None else str(source)
            return self._load(MediaRef(kind, text, where, uuid, held.media_id)), None
        if uuid is not None:
            raise InvalidRequest(f"{where}: a uuid is for media sent as one file or URL", param=where)
        if isinstance(source, bytes | bytearray | memoryview):
            return Loaded(bytes(source)), None
        if kind == "video" and _are_files(source):
            return Loaded(tuple(self._frame(f, i, f"{where}[{i}]") for i, f in enumerate(source))), None
        return Loaded(b""), source

    def _frame(self, value: Any, number: int, where: str) -> bytes:
        source = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if not isinstance(source, str | Path) or not str(source):
            raise InvalidRequest(f"{where} must be a URL", param=where)
        data = self.loader(MediaRef("image", str(source), where, frame=number)).data
        assert isinstance(data, bytes), "a picture is one file"
        return data

    def _load(self, ref: MediaRef) -> Loaded:
        loaded = self.loader(ref)
        if ref.kind and loaded.kind and loaded.kind != ref.kind:
            raise InvalidRequest(
                f"{ref.param} names a stored {loaded.kind}, and stands where a {ref.kind} is due",
                param=ref.param,
            )
        return loaded


def _text(fields: Mapping[str, Any], param: str) -> TextPart:
    if "text" not in fields:
        raise InvalidRequest(f"{param} is missing", param=param)
    if not isinstance(fields["text"], str):
        raise InvalidRequest(f"{param} must be a string", param=param)
    return TextPart(fields["text"])


# ---------------------------------------------------------------- fields


def _mapping(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object, not {type(value).__name__}", param=param)
    return value


def _holder(fields: Mapping[str, Any], form: Form, param: str) -> str:
    """The field that holds the media; where none does, the one that is null, or the first."""
    given = [name for name in form.fields if fields.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequest(
            f"{param}: give one of {' and '.join(given)}, not both", param=inside(param, given[1])
        )
    present = [name for name in form.fields if name in fields]
    return (given or present or form.fields)[0]


def _url(value: Any, where: str) -> Held:
    """``"..."``, ``{"url": "...", option: ...}``, or the URLs of a clip's frames in a list."""
    if value is None or (isinstance(value, str) and value) or _is_list(value):
        return Held(value)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be a URL, or an object with a url", param=where)
    options = {k: v for k, v in value.items() if k not in ("url", "frames")}
    source = value.get("frames") if value.get("url") is None else value["url"]
    if source is not None and not (isinstance(source, str) and source) and not _is_list(source):
        raise InvalidRequest(f"{where}.url must be a URL", param=where)
    return Held(source, options=options)


def _picture_url(value: Any, where: str) -> Held:
    held = _url(value, where)
    if _is_list(held.source) or (isinstance(value, Mapping) and "frames" in value):
        raise InvalidRequest(
            f"{where} must be one URL; a list of frames is a clip: send a video_url", param=where
        )
    return held


def _raw_video(value: Any, where: str) -> Held:
    """``{"data": base64 or data URL, "format": "mp4", option: ...}``, or the data alone."""
    fields = {"data": value} if isinstance(value, str) or value is None else _mapping(value, where)
    data, kind = fields.get("data"), fields.get("format") or "mp4"
    if data is None:
        return Held(options={k: v for k, v in fields.items() if k not in ("data", "format")})
    if not isinstance(data, str) or not data or not isinstance(kind, str):
        raise InvalidRequest(f"{where}.data must be base64 or a data URL", param=f"{where}.data")
    is_url = data[:16].lstrip()[:5].lower() == "data:"
    source = data if is_url else f"data:video/{kind};base64,{data}"
    return Held(source, options={k: v for k, v in fields.items() if k not in ("data", "format")})


def _id(value: Any, where: str) -> Held:
    return Held(media_id=_name(value, where))


def _name(value: Any, where: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise InvalidRequest(f"{where} must be a string of 1 to {LONGEST_NAME} characters", param=where)
    return value


def _thing(value: Any, where: str) -> Held:
    return Held(value)


_OPENERS: dict[str, Callable[[Any, str], Held]] = {
    "image_url": _picture_url,
    "video_url": _url,
    "input_video": _raw_video,
    "image": _thing,
    "video": _thing,
    "url": _picture_url,
    "file_id": _id,
    "media_id": _id,
}


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_files(value: Any) -> bool:
    """Whether a clip's frames come as files: URLs, paths or encoded bytes."""
    return _is_list(value) and any(
        isinstance(v, str | Path | bytes | bytearray | memoryview | Mapping) for v in value
    )


# ---------------------------------------------------------------- media given as objects


def _pixels(value: Any, param: str, background: tuple[int, ...] = WHITE) -> np.ndarray:
    """uint8 RGB [H, W, 3] of a PIL picture or a grey, RGB or RGBA array; alpha goes over ``background``."""
    array = _array(value) if hasattr(value, "convert") else value
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise InvalidRequest(
            f"{param} must be a path, URL, bytes, PIL picture or uint8 array [H, W, 3]", param=param
        )
    array = np.repeat(array[:, :, None], 3, axis=2) if array.ndim == 2 else array
    if array.shape[2] not in (3, 4) or 0 in array.shape:
        raise InvalidRequest(f"{param} must have shape [H, W, 3], not {list(array.shape)}", param=param)
    return np.ascontiguousarray(array) if array.shape[2] == 3 else _over(array, background)


def _array(picture: Any) -> np.ndarray:
    has_alpha = picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info
    return np.asarray(picture.convert("RGBA" if has_alpha else "RGB"))


def _over(rgba: np.ndarray, background: tuple[int, ...]) -> np.ndarray:
    alpha = rgba[:, :, 3:].astype(np.uint32)
    under = np.array(background, np.uint32)
    return ((rgba[:, :, :3] * alpha + under * (255 - alpha) + 127) // 255).astype(np.uint8)


def _frames(value: Any, param: str) -> np.ndarray:
    if isinstance(value, np.ndarray) and value.ndim != 4:
        raise InvalidRequest(f"{param} must have shape [F, H, W, 3], not {list(value.shape)}", param=param)
    if not isinstance(value, np.ndarray | Sequence) or len(value) == 0:
        raise InvalidRequest(f"{param} must be a path, URL, bytes or a list of frames", param=param)
    frames = [_pixels(frame, f"{param}[{i}]") for i, frame in enumerate(value)]
    if len({f.shape for f in frames}) > 1:
        raise InvalidRequest(f"{param}: all frames must have one size", param=param)
    return np.stack(frames)
