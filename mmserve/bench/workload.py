"""What the requests of a load ask: pictures, clips and words, made from a seed so that every server gets
the same."""

import base64
import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from mmserve.bench.media import Sample, clip, still

Images = Literal["distinct", "same", "none"]
_COMMON = (
    "the of and to in is that for it as with on be by this are from at or an have not which was can but all"
    " if will one may use when there other then more than only any new time value name list file return"
)
WORDS = _COMMON.split()


@dataclass(frozen=True)
class Workload:
    """The shape of every request. ``images``: each request's own, one set for all, or none; sizes in pixels.

    ``clip_seconds`` 0 is no clip. ``text_words`` are common short words, about a token each.
    """

    images: Images = "distinct"
    images_per_request: int = 1
    width: int = 512
    height: int = 512
    image_format: str = "PNG"
    clip_seconds: int = 0
    text_words: int = 32
    max_tokens: int = 64
    ignore_eos: bool = True

    def bodies(self, model: str, count: int, seed: int) -> list[bytes]:
        """``count`` bodies for /v1/chat/completions, equal ones for equal seeds."""
        if self.images == "same":
            return [self.body(model, seed)] * count
        return [self.body(model, seed * 1009 + number) for number in range(count)]

    def body(self, model: str, seed: int) -> bytes:
        fields = {
            "model": model,
            "messages": [{"role": "user", "content": [*self._media(seed), self._text(seed)]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True  # no field of OpenAI's own, so it is sent only where it is wanted
        return json.dumps(fields).encode()

    def _media(self, seed: int) -> list[dict[str, Any]]:
        pictures = 0 if self.images == "none" else self.images_per_request
        numbers = [seed * 101 + number for number in range(pictures)]
        parts = [
            part("image", still(self.height, self.width, self.image_format, seed=number))
            for number in numbers
        ]
        if self.clip_seconds:
            parts.append(part("video", clip(self.height, self.width, self.clip_seconds, seed=seed)))
        return parts

    def _text(self, seed: int) -> dict[str, str]:
        choose = random.Random(seed)
        return {"type": "text", "text": " ".join(choose.choices(WORDS, k=self.text_words))}


def part(kind: Literal["image", "video"], sample: Sample) -> dict[str, Any]:
    """A content part that holds the whole file as a data URL."""
    mime = "video/mp4" if kind == "video" else f"image/{sample.name.split()[0].lower()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(sample.data, mime)}}


def data_url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
