"""What the model saw of each picture and clip, as the answers tell it."""

from collections.abc import Sequence
from typing import Any

from mmserve.core.messages import ImagePart, Message, Seen, VideoPart


def media_body(messages: Sequence[Message], seen: Sequence[Seen], include: Sequence[str]) -> dict[str, Any]:
    """An answer's ``media``, if asked for, and ``warnings``, if there are any, about ``messages``."""
    places = [p.param for m in messages for p in m.content if isinstance(p, ImagePart | VideoPart)]
    told = list(zip(places, seen, strict=bool(seen)))
    warnings = [{"param": place, "message": words} for place, s in told for words in s.warnings]
    body: dict[str, Any] = {"warnings": warnings} if warnings else {}
    if "media" in include:
        body["media"] = [{"param": place, **seen_body(s)} for place, s in told]
    return body


def seen_body(seen: Seen) -> dict[str, Any]:
    """One picture or clip: sizes in pixels, the grid in patches of one frame, times in seconds.

    ``orientation`` is the EXIF orientation that was undone (1: there was nothing to turn). ``cached`` tells
    that nothing had to be decoded again. Of a clip, ``dropped_tokens`` are those that showed nothing new.
    """
    body = {
        "kind": seen.kind,
        "format": seen.format,
        "source_size": _area(seen.source_size),
        "size": _area(seen.size),
        "grid": _area(seen.grid),
        "tokens": seen.tokens,
        "orientation": seen.orientation,
        "warnings": list(seen.warnings),
        "cached": seen.cached,
    }
    if seen.kind == "image":
        return body
    times = [round(t, 6) for t in seen.timestamps]
    return {**body, "dropped_tokens": seen.dropped_tokens, "timestamps": times}


def _area(size: tuple[int, int]) -> dict[str, int]:
    return {"width": size[1], "height": size[0]}
