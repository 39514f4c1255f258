"""What the api, engine and detokenizer processes say to each other: msgpack over sockets, one way round.

    api ── Submit, Supply, Abort, Carry, Speak ──▶ engine ── Step ──▶ detokenizer ── Told ──▶ api

A *ticket* numbers a submission, since two may bring the same request id, or an order to carry over. One
``Step`` has all that one step of the engine had to say. Pixels stand in the arena and are lent: a *loan*
numbers one array, and ``News.returned`` tells that the engine has dropped every view of it. Each child is
started with a socket to its parent, over which it is told all it needs and says ``Ready``, and then ``Alive``
for as long as it lives, or ``NotReady``; that socket's end is the parent's end.
"""

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from mmserve.answer import Brief, Said
from mmserve.core.config import Config
from mmserve.core.messages import CarryOver, PixelsWanted, PreparedRequest, TokenOutput
from mmserve.core.wire import Fault, decoded, encoded

# ---------------------------------------------------------------- from a parent to its child


class EngineHello(Struct, tag=True, frozen=True):
    """All that an engine needs. It listens at ``listen``."""

    config: Config
    eos_ids: tuple[int, ...]
    tokenizer_json: str
    arena_bytes: int
    listen: str


class DetokenizerHello(Struct, tag=True, frozen=True):
    tokenizer_json: str
    listen: str
    speak: str


Hello = EngineHello | DetokenizerHello


class Ready(Struct, tag=True, frozen=True):
    """The child listens. ``told`` are lines for the log."""

    told: tuple[str, ...] = ()


class NotReady(Struct, tag=True, frozen=True):
    """The child cannot do what it was started for, and ends."""

    fault: Fault


class Alive(Struct, tag=True, frozen=True):
    """The child runs, and has been at its present step for so long; 0 when it has nothing to do."""

    busy_s: float


FromChild = Ready | NotReady | Alive

# ---------------------------------------------------------------- to the engine


class Slot(Struct, frozen=True):
    """uint8 pixels of ``shape``, ``offset`` bytes from the arena's beginning."""

    loan: int
    offset: int
    shape: tuple[int, ...]


class Submit(Struct, tag=True, frozen=True):
    """``slots`` are the items' pixels, in their order; None where the engine is thought to need none."""

    ticket: int
    request: PreparedRequest
    slots: tuple[Slot | None, ...]


class Supply(Struct, tag=True, frozen=True):
    ticket: int
    slots: tuple[tuple[bytes, Slot], ...]  # by digest


class Abort(Struct, tag=True, frozen=True):
    ticket: int


class Carry(Struct, tag=True, frozen=True):
    ticket: int
    order: CarryOver


class Speak(Struct, tag=True, frozen=True):
    """A new detokenizer listens at ``path``; it is to be told first what the one before may have lost."""

    path: str


ToEngine = Submit | Supply | Abort | Carry | Speak

# ---------------------------------------------------------------- from the engine


class News(Struct, frozen=True):
    """What there is to know beside the answers: figures, digests that came and went, loans that ended.

    ``held`` and ``borrowed``, all of them, come first of all to a new detokenizer.
    """

    stats: dict[str, Any] | None = None
    came: tuple[bytes, ...] = ()
    went: tuple[bytes, ...] = ()
    returned: tuple[int, ...] = ()
    held: frozenset[bytes] | None = None
    borrowed: frozenset[int] | None = None


class Opened(Struct, tag=True, frozen=True):
    """The first output of a request follows."""

    ticket: int
    brief: Brief


class Output(Struct, tag=True, frozen=True):
    ticket: int
    output: TokenOutput


class Wanted(Struct, tag=True, frozen=True):
    ticket: int
    wanted: PixelsWanted


class Failed(Struct, tag=True, frozen=True):
    """The request was refused, or is lost."""

    ticket: int
    fault: Fault


class Closed(Struct, tag=True, frozen=True):
    """The request was aborted; nothing more is said to it."""

    ticket: int


class Carried(Struct, tag=True, frozen=True):
    """The order was carried out, and so many tokens are cached; or it was refused."""

    ticket: int
    tokens: int = 0
    fault: Fault | None = None


Event = Opened | Output | Wanted | Failed | Closed | Carried


class Step(Struct, frozen=True):
    events: list[Event]
    news: News | None = None


# ---------------------------------------------------------------- from the detokenizer


class Text(Struct, tag=True, frozen=True):
    ticket: int
    said: Said


ToldEvent = Text | Wanted | Failed | Carried


class Told(Struct, frozen=True):
    """A ``Step`` whose outputs have become text."""

    events: list[ToldEvent]
    news: News | None = None


# ---------------------------------------------------------------- bytes


def bare(request: PreparedRequest) -> PreparedRequest:
    """``request`` without its pixels, as it stands in a ``Submit``."""
    items = tuple(msgspec.structs.replace(item, pixels=None) for item in request.items)
    return msgspec.structs.replace(request, items=items)


def clothed(request: PreparedRequest, pixels: tuple[np.ndarray | None, ...]) -> PreparedRequest:
    """``request`` with its items' pixels again."""
    items = zip(request.items, pixels, strict=True)
    return msgspec.structs.replace(
        request, items=tuple(msgspec.structs.replace(item, pixels=own) for item, own in items)
    )


def to_bytes(message: Any) -> bytes:
    """OverflowError, UnicodeEncodeError or TypeError for values that cannot be sent."""
    return _encoder.encode(message)


_encoder = msgspec.msgpack.Encoder(enc_hook=encoded)
to_hello = msgspec.msgpack.Decoder(Hello, dec_hook=decoded).decode
from_child = msgspec.msgpack.Decoder(FromChild, dec_hook=decoded).decode
to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=decoded).decode
to_step = msgspec.msgpack.Decoder(Step, dec_hook=decoded).decode
to_told = msgspec.msgpack.Decoder(Told, dec_hook=decoded).decode
