"""OpenAI-shaped conversations, checked and turned into ``core.messages.Message``.

Media named by a URL or a path is bytes that somebody has to fetch. Parsing and fetching are apart, so
that a server can fetch all of a request's media at once, on its own event loop and under its own rules::

    refs = media_refs(messages)
    blobs = dict(zip(refs, await asyncio.gather(*map(fetch, refs))))
    parsed = parse_messages(messages, blobs.__getitem__)

What a source string may be (data URL, http, a file) is the loader's decision alone.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ImagePart, Message, Part, TextPart, VideoPart

ROLES = {"system", "developer", "user", "assistant", "tool"}
LOW_DETAIL_PIXELS = 512 * 512  # what "detail": "low" means to OpenAI
LARGEST = sys.float_info.max
_PIXEL_FIELDS = ("min_pixels", "max_pixels")
_VIDEO_FIELDS = (*_PIXEL_FIELDS, "fps", "num_frames", "timestamps")


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Media that must be fetched: ``source`` as the caller wrote it, ``param`` where it stood."""

    kind: Literal["image", "video"]
    source: str
    param: str


Loader = Callable[[MediaRef], bytes]


def media_refs(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> tuple[MediaRef, ...]:
    """The media of ``messages`` that must be fetched, in order; InvalidRequest if a message is malformed."""
    refs: list[MediaRef] = []

    def record(ref: MediaRef) -> bytes:
        refs.append(ref)
        return b""

    parse_messages(messages, record, param)
    return tuple(refs)


def parse_messages(
    messages: Sequence[Mapping[str, Any]], loader: Loader, param: str = "messages"
) -> tuple[Message, ...]:
    """Messages of a conversation. ``loader`` gives the bytes of each ``MediaRef``.

    Content is a string or a list of parts: ``text``, ``image_url``, ``video_url`` as OpenAI has them, and
    ``{"type": "image", "image": X}`` or ``{"type": "video", "video": X}`` where X is a source string, a
    path, encoded bytes, a PIL picture, or a uint8 array (frames ``[F, H, W, 3]`` or a list for video).
    InvalidRequest names the field, e.g. ``messages[1].content[0].image_url``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(f"{param} must be a list with at least one message", param=param)
    return tuple(_message(m, loader, f"{param}[{i}]") for i, m in enumerate(messages))


def _message(message: Any, loader: Loader, param: str) -> Message:
    fields = _mapping(message, param)
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"{param}.role must be one of {', '.join(sorted(ROLES))}, not {role!r}", param=f"{param}.role"
        )
    extra = {k: v for k, v in fields.items() if k not in ("role", "content") and v is not None}
    content = _content(fields.get("content"), bool(extra.get("tool_calls")), loader, f"{param}.content")
    return Message("system" if role == "developer" else role, content, extra)


def _content(content: Any, may_be_empty: bool, loader: Loader, param: str) -> tuple[Part, ...]:
    if content is None and may_be_empty:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{param} must be a string or a list of parts", param=param)
    return tuple(_part(p, loader, f"{param}[{i}]") for i, p in enumerate(content))


def _part(part: Any, loader: Loader, param: str) -> Part:
    if isinstance(part, str):
        return TextPart(part)
    fields = _mapping(part, param)
    kind = fields.get("type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise InvalidRequest(
            f"{param}.type must be one of {', '.join(_READERS)}, not {kind!r}", param=f"{param}.type"
        )
    if kind not in fields:
        raise InvalidRequest(f"{param}.{kind} is missing", param=f"{param}.{kind}")
    return reader(fields, loader, f"{param}.{kind}")


def _text(fields: Mapping[str, Any], loader: Loader, param: str) -> TextPart:
    if not isinstance(fields["text"], str):
        raise InvalidRequest(f"{param} must be a string", param=param)
    return TextPart(fields["text"])


def _image_url(fields: Mapping[str, Any], loader: Loader, param: str) -> ImagePart:
    url, options = _url(fields["image_url"], param)
    options = _counts({**_detail(options, param), **fields, **options}, _PIXEL_FIELDS, param)
    return ImagePart(data=loader(MediaRef("image", url, param)), param=param, **options)


def _video_url(fields: Mapping[str, Any], loader: Loader, param: str) -> VideoPart:
    url, options = _url(fields["video_url"], param)
    options = _counts({**fields, **options}, _VIDEO_FIELDS, param)
    return VideoPart(data=loader(MediaRef("video", url, param)), param=param, **options)


def _image(fields: Mapping[str, Any], loader: Loader, param: str) -> ImagePart:
    value, options = fields["image"], _counts(fields, _PIXEL_FIELDS, param)
    if isinstance(value, str | Path | bytes | bytearray | memoryview):
        return ImagePart(data=_bytes(value, "image", loader, param), param=param, **options)
    return ImagePart(pixels=_pixels(value, param), param=param, **options)


def _video(fields: Mapping[str, Any], loader: Loader, param: str) -> VideoPart:
    value, options = fields["video"], _counts(fields, _VIDEO_FIELDS, param)
    if isinstance(value, str | Path | bytes | bytearray | memoryview):
        return VideoPart(data=_bytes(value, "video", loader, param), param=param, **options)
    return VideoPart(frames=_frames(value, param), param=param, **options)


_READERS: dict[str, Callable[[Mapping[str, Any], Loader, str], Part]] = {
    "text": _text,
    "image_url": _image_url,
    "video_url": _video_url,
    "image": _image,
    "video": _video,
}


# ---------------------------------------------------------------- fields


def _mapping(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object, not {type(value).__name__}", param=param)
    return value


def _url(value: Any, param: str) -> tuple[str, Mapping[str, Any]]:
    """The URL of ``"..."`` or ``{"url": "...", option: ...}``, and the options beside it."""
    options = {} if isinstance(value, str) else _mapping(value, param)
    url = value if isinstance(value, str) else options.get("url")
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{param}.url must be a URL", param=param)
    return url, options


def _detail(options: Mapping[str, Any], param: str) -> dict[str, int]:
    detail = options.get("detail") or "auto"
    if detail not in ("auto", "low", "high"):
        raise InvalidRequest(
            f"{param}.detail must be auto, low or high, not {detail!r}", param=f"{param}.detail"
        )
    return {"max_pixels": LOW_DETAIL_PIXELS} if detail == "low" else {}


def _counts(fields: Mapping[str, Any], names: tuple[str, ...], param: str) -> dict[str, Any]:
    """The numeric options ``names`` that ``fields`` sets; ``timestamps`` becomes a tuple of seconds."""
    return {n: _number(fields[n], n, param) for n in names if fields.get(n) is not None}


def _number(value: Any, name: str, param: str) -> Any:
    owner = param.rpartition(".")[0]
    if name == "timestamps":
        if isinstance(value, Sequence) and all(_is_number(v) and v >= 0 for v in value):
            return tuple(float(v) for v in value)
        raise InvalidRequest(f"{name} must be a list of seconds", param=f"{owner}.{name}")
    if not _is_number(value) or value <= 0:
        raise InvalidRequest(f"{name} must be a positive number, not {value!r}", param=f"{owner}.{name}")
    return float(value) if name == "fps" else int(value)


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number, and as a float still one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


# ---------------------------------------------------------------- media given as objects


def _bytes(value: Any, kind: Literal["image", "video"], loader: Loader, param: str) -> bytes:
    if isinstance(value, str | Path):
        return loader(MediaRef(kind, str(value), param))
    return bytes(value)


def _pixels(value: Any, param: str) -> np.ndarray:
    """uint8 RGB [H, W, 3] of a PIL picture or of a grey, RGB or RGBA array; alpha goes over white."""
    array = _array(value) if hasattr(value, "convert") else value
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise InvalidRequest(
            f"{param} must be a path, URL, bytes, PIL picture or uint8 array [H, W, 3]", param=param
        )
    array = np.repeat(array[:, :, None], 3, axis=2) if array.ndim == 2 else array
    if array.shape[2] not in (3, 4) or 0 in array.shape:
        raise InvalidRequest(f"{param} must have shape [H, W, 3], not {list(array.shape)}", param=param)
    return np.ascontiguousarray(array) if array.shape[2] == 3 else _over_white(array)


def _array(picture: Any) -> np.ndarray:
    has_alpha = picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info
    return np.asarray(picture.convert("RGBA" if has_alpha else "RGB"))


def _over_white(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[:, :, 3:].astype(np.uint32)
    return ((rgba[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def _frames(value: Any, param: str) -> np.ndarray:
    if isinstance(value, np.ndarray) and value.ndim != 4:
        raise InvalidRequest(f"{param} must have shape [F, H, W, 3], not {list(value.shape)}", param=param)
    if not isinstance(value, np.ndarray | Sequence) or len(value) == 0:
        raise InvalidRequest(f"{param} must be a path, URL, bytes or a list of frames", param=param)
    frames = [_pixels(frame, f"{param}[{i}]") for i, frame in enumerate(value)]
    if len({f.shape for f in frames}) > 1:
        raise InvalidRequest(f"{param}: all frames must have one size", param=param)
    return np.stack(frames)
