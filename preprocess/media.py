"""What one image or video part became: vision items without their place in a prompt."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from mmserve.core.digest import framed_digest
from mmserve.core.errors import ContextLengthExceeded, MediaError, MMServeError
from mmserve.core.messages import ChatInput, ImagePart, TextPart, VideoPart
from mmserve.core.messages import Seen as Seen
from mmserve.preprocess.spec import ProcessorSpec

Kind = Literal["image", "video"]
MediaPart = ImagePart | VideoPart


@dataclass(frozen=True)
class Medium:
    """Resized pixels of one part, one entry per vision item.

    ``pixels[i]`` is uint8 [frames, H, W, 3] and read-only, shared by every request that brings the same
    bytes; None where the encoder holds ``digests[i]``. ``timestamps[i]`` is the item's time in seconds
    (video only); ``seconds_per_grid`` the mean time from one item to the next. ``stages`` are the seconds
    that each stage took. ``kept[i]`` are the cells of item i that become tokens, int32 and ascending, None
    where all do; it is empty where that holds for every item. ``reference`` is what the next clip of one item
    is pruned against (see ``pruning.Pruned``), of one that was pruned itself.
    """

    kind: Kind
    grid: tuple[int, int]
    pixels: tuple[np.ndarray | None, ...]
    digests: tuple[bytes, ...]
    seen: Seen
    timestamps: tuple[float, ...] = ()
    seconds_per_grid: float = 1.0
    kept: tuple[np.ndarray | None, ...] = ()
    reference: np.ndarray | None = None
    stages: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pixels if p is not None)

    def kept_of(self, item: int) -> np.ndarray | None:
        """The cells of ``item`` that become tokens; None for all."""
        return self.kept[item] if self.kept else None


def media_parts(chat: ChatInput, most: int) -> list[MediaPart]:
    """The pictures and clips of a conversation, in order; MediaError when there are more than ``most``."""
    found = [p for m in chat.messages for p in m.content if isinstance(p, ImagePart | VideoPart)]
    if len(found) > most:
        raise MediaError(
            f"there are {len(found)} pictures and clips; at most {most} are allowed", param="messages"
        )
    return found


def check_text(chat: ChatInput, most: int) -> None:
    """ContextLengthExceeded when the words of ``chat`` have more than ``most`` characters, before anybody
    spends time on them."""
    texts = [p.text for m in chat.messages for p in m.content if isinstance(p, TextPart)]
    if isinstance(chat.prompt, str):
        texts.append(chat.prompt)
    total = sum(map(len, texts))
    if total > most:
        raise ContextLengthExceeded(
            f"the request has {total} characters of text; at most {most} are allowed",
            param="prompt" if chat.prompt is not None else "messages",
        )


def without_pixels(medium: Medium) -> Medium:
    """All of ``medium`` that a prompt is laid out by."""
    return replace(medium, pixels=(None,) * len(medium.pixels))


def item_digest(pixels: np.ndarray, spec: ProcessorSpec, kept: np.ndarray | None = None) -> bytes:
    """The name of an item's embeddings: its pixels, their shape, how the family cuts patches, and which cells
    are ``kept`` if not all are."""
    shape = "x".join(map(str, pixels.shape))
    options = f"{spec.family}/{spec.patch}/{spec.merge}/{spec.temporal_patch}"
    cells = () if kept is None else (kept.astype("<i4").tobytes(),)
    return framed_digest("vision item", options, shape, np.ascontiguousarray(pixels).data, *cells)


@contextmanager
def naming(param: str | None) -> Iterator[None]:
    """Errors raised inside say which field of the request they are about."""
    try:
        yield
    except MMServeError as error:
        error.param = error.param or param
        raise
