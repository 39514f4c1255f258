"""What the keeper and its workers say to each other: length-prefixed msgpack over a socket.

    keeper                                         worker
      Hello ──────────────────────────────────────▶   (once)
      ◀───────────────────────────────────────── Ready
      See ────────────────────────────────────────▶
      ◀────────────────────────────────────────── Need        once the size of the pixels is known
      Granted or Denied ──────────────────────────▶
      ◀─────────────────────────── Seen, Failed or GaveUp     ends the job

Instead of ``See``, ``LayOut`` asks for a prompt and ``LaidOut`` answers, or ``Glance`` for a thumbnail and
``Glanced`` answers. ``Cancel`` may come at any moment and may be late. A worker has one job at a time, so its
answers need no number. Encoded files and pixels stand in the arena and are told by their place; nothing here
is larger than a prompt's text and token ids. Everything is decoded into the types below, so nothing that a
worker says is executed.
"""

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from mmserve.core.config import MediaOptions
from mmserve.core.messages import ChatInput, ImagePart, VideoPart
from mmserve.core.wire import Fault, decoded, encoded, prefixed
from mmserve.preprocess.media import Medium
from mmserve.preprocess.prompt import Prompt
from mmserve.preprocess.spec import ProcessorSpec

_BIG_INT = 1  # an extension type of ours: an integer beyond 64 bits, as its digits


class Bulk(Struct, frozen=True):
    """Bytes at ``offset`` of the arena that belong to ``field`` of a part: a file, or uint8 of ``shape``."""

    field: str
    offset: int
    nbytes: int
    shape: tuple[int, ...] | None = None


class Slot(Struct, frozen=True):
    """The pixels of one vision item, ``at`` bytes from the start of the memory that was granted."""

    at: int
    shape: tuple[int, ...]


# ---------------------------------------------------------------- to a worker


class Hello(Struct, tag=True, frozen=True):
    """All that a worker needs to know. ``memory_bytes`` bounds its own memory, the arena not counted.

    One that ``writes`` lays prompts out, another decodes pictures and clips.
    """

    writes: bool
    spec: ProcessorSpec
    media: MediaOptions
    arena_bytes: int
    memory_bytes: int


class See(Struct, tag=True, frozen=True):
    """Decode and resize ``part``, whose files and arrays stand in the arena."""

    job: int
    part: ImagePart | VideoPart
    bulk: tuple[Bulk, ...]


class Glance(Struct, tag=True, frozen=True):
    """Make the luma thumbnail of the encoded picture that stands at ``bulk`` in the arena."""

    job: int
    bulk: Bulk


class LayOut(Struct, tag=True, frozen=True):
    """Lay out the prompt of ``chat``; ``media`` without their pixels."""

    job: int
    chat: ChatInput
    media: tuple[Medium, ...]


class Granted(Struct, tag=True, frozen=True):
    offset: int


class Denied(Struct, tag=True, frozen=True):
    """There is no memory for the pixels; the worker gives the job up."""


class Cancel(Struct, tag=True, frozen=True):
    """Nobody waits for ``job`` any more, if it still runs."""

    job: int


ToWorker = Hello | See | Glance | LayOut | Granted | Denied | Cancel

# ---------------------------------------------------------------- from a worker


class Ready(Struct, tag=True, frozen=True):
    """The worker can take jobs."""


class Need(Struct, tag=True, frozen=True):
    """The resized pixels will take so many bytes. Asked at most once for a job."""

    nbytes: int


class Seen(Struct, tag=True, frozen=True):
    """``medium`` has no pixels; they stand in ``slots``. ``memory_bytes`` is what the worker holds now."""

    medium: Medium
    slots: tuple[Slot, ...]
    memory_bytes: int


class Glanced(Struct, tag=True, frozen=True):
    """``luma`` is uint8 [h, w]."""

    luma: np.ndarray
    memory_bytes: int


class LaidOut(Struct, tag=True, frozen=True):
    """``hits`` and ``misses`` are of pieces of text that were tokenised before."""

    prompt: Prompt
    hits: int
    misses: int
    memory_bytes: int


class Failed(Struct, tag=True, frozen=True):
    fault: Fault
    memory_bytes: int


class GaveUp(Struct, tag=True, frozen=True):
    """The job was cancelled, or denied its memory."""

    memory_bytes: int


FromWorker = Ready | Need | Seen | Glanced | LaidOut | Failed | GaveUp

# ---------------------------------------------------------------- bytes


def to_bytes(message: Any) -> bytes:
    """A message with its length in front. RecursionError if it is nested too deeply."""
    return prefixed(_encoder.encode(message))


def to_worker(body: bytes) -> ToWorker:
    return _to_worker.decode(body)


def from_worker(body: bytes) -> FromWorker:
    """ValueError (msgspec's) when it is no message."""
    return _from_worker.decode(body)


def plain_int(value: int) -> int | msgspec.msgpack.Ext:
    """An integer in the form in which any can be sent."""
    if -(1 << 63) <= value < 1 << 64:
        return int(value)
    return msgspec.msgpack.Ext(_BIG_INT, str(value).encode())


def _extension(code: int, data: memoryview) -> int:
    if code != _BIG_INT:
        raise ValueError(f"extension type {code} is not part of any message")
    return int(bytes(data))


_encoder = msgspec.msgpack.Encoder(enc_hook=encoded)
_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=decoded, ext_hook=_extension)
_from_worker = msgspec.msgpack.Decoder(FromWorker, dec_hook=decoded, ext_hook=_extension)
