"""A session's context: a prompt that grows, and whose beginning is dropped in bulk."""

import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from mmserve.core.messages import CarryOver, PreparedRequest, SamplingParams, VisionItem
from mmserve.core.thinking import Thinking
from mmserve.live.chat_text import Role
from mmserve.preprocess.layout import lay_out, radix_keys
from mmserve.preprocess.media import MediaPart, Medium
from mmserve.preprocess.positions import mrope
from mmserve.preprocess.prompt import items_of
from mmserve.preprocess.writer import Writer

Kind = Literal["head", "frame", "exchange", "told"]


class Source(Struct, frozen=True):
    """How the pixels of a medium's items can be had again: by ``part``, or they are kept."""

    digests: tuple[bytes, ...]
    part: MediaPart | None = None
    pixels: tuple[np.ndarray, ...] | None = None

    @classmethod
    def of(cls, part: MediaPart, medium: Medium) -> "Source":
        """Whatever takes less memory: what was sent, or what became of it (copied out of the arena)."""
        pixels = [p for p in medium.pixels if p is not None]
        if len(pixels) < len(medium.pixels) or _nbytes(part) <= medium.nbytes:
            return cls(medium.digests, part=part)
        return cls(medium.digests, pixels=tuple(p.copy() for p in pixels))

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pixels or ()) + (_nbytes(self.part) if self.part else 0)


class Stretch(Struct, frozen=True):
    """A stretch of a prompt by itself: ``token_ids`` int32 [n], ``radix_keys`` int64 [n], ``positions`` int32
    [3, n] from 0; the text behind it goes on at ``advance``. Spans of ``items`` count from its beginning."""

    token_ids: np.ndarray
    radix_keys: np.ndarray
    positions: np.ndarray
    advance: int
    items: tuple[VisionItem, ...] = ()
    sources: tuple[Source, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


def lay(ids: Sequence[int], writer: Writer, media: Sequence[tuple[MediaPart, Medium]] = ()) -> Stretch:
    """``ids``, with a placeholder for each of ``media``, laid out as ``Writer.lay_out`` would."""
    seen = [medium for _, medium in media]
    layout = lay_out(ids, seen, writer.spec, writer.text.encode)
    positions, delta = mrope(len(layout.token_ids), layout.blocks)
    return Stretch(
        layout.token_ids,
        radix_keys(layout, seen) if len(layout.token_ids) else np.empty(0, np.int64),
        positions,
        len(layout.token_ids) + delta,
        items_of(seen, layout.spans),
        tuple(Source.of(part, medium) for part, medium in media),
    )


class Segment(Struct, kw_only=True):
    """Tokens [start, stop) of the trunk, whose first stands at ``position``. ``at`` is a frame's time,
    ``name`` what somebody calls a text, ``turn`` the number of the answer with which it goes. Each begins in
    a turn of the user, so any of them can be taken out. What follows goes on ``advance`` positions later."""

    kind: Kind
    number: int
    start: int
    stop: int
    position: int
    at: float | None = None
    name: str | None = None
    turn: int | None = None
    role: Role = "user"  # whose turn stands open behind it
    advance: int = 0
    items: tuple[VisionItem, ...] = ()  # spans count from ``start``
    sources: tuple[Source, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> bool:
        """Whether it is whole; a frame that is not goes on from the frames before it, back to such a one."""
        return all(item.kept is None for item in self.items)


class Trunk:
    """Segments one behind the other; the first is the head, which is never dropped.

        keys       |- head -|- frame -|- frame -|- exchange -|- frame -|
        positions  0 ......................................... next_position
                                after a drop: survivors keep theirs
        positions  0 .......          40 ........................ next_position

    Arrays are written once and only grow; what ``request`` hands out is a read-only view of them, so it costs
    nothing and stays what it is. A drop makes new ones. From then on the keys stand under a salt of the
    trunk's own, a secret and the number of the epoch: what was computed from a context that is lost is found
    by nobody else, and by this trunk only as long as the context is the same.
    """

    def __init__(self, head: Stretch, salt: str | None = None) -> None:
        self.salt = salt
        self.epoch = 0
        self.version = 0  # grows with every change
        self.segments: list[Segment] = []
        self.next_position = 0
        self._secret = secrets.token_hex(16)
        self._numbers = 0
        self._ids = _Grown(np.int32)
        self._keys = _Grown(np.int64)
        self._positions = _Grown(np.int32, 3)
        self.append("head", head)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def keys(self) -> np.ndarray:
        """Radix keys, int64 [N], read-only."""
        return self._keys.view()

    @property
    def role(self) -> Role:
        """Whose turn stands open at the end."""
        return self.segments[-1].role

    @property
    def frames(self) -> int:
        """Segments that show frames."""
        return sum(segment.kind == "frame" for segment in self.segments)

    @property
    def source_bytes(self) -> int:
        """Bytes kept to make pixels again."""
        return sum(source.nbytes for segment in self.segments for source in segment.sources)

    # ------------------------------------------------------------ growing

    def append(
        self,
        kind: Kind,
        stretch: Stretch,
        *,
        at: float | None = None,
        name: str | None = None,
        turn: int | None = None,
        role: Role = "user",
    ) -> Segment:
        """Put ``stretch`` at the end; costs no more than the stretch."""
        start = len(self)
        segment = Segment(
            kind=kind,
            number=self._numbers,
            start=start,
            stop=start,
            position=self.next_position,
            at=at,
            name=name,
            turn=turn,
            role=role,
            items=stretch.items,
            sources=stretch.sources,
        )
        self._numbers += 1
        self.segments.append(segment)
        self._write(segment, stretch)
        return segment

    def extend(self, stretch: Stretch, role: Role) -> None:
        """Lengthen the last segment, behind which a turn of ``role`` stands open then."""
        last = self.segments[-1]
        last.items += tuple(_moved(item, len(last)) for item in stretch.items)
        last.sources += stretch.sources
        last.role = role
        self._write(last, stretch)

    def _write(self, segment: Segment, stretch: Stretch) -> None:
        self._ids.add(stretch.token_ids)
        self._keys.add(stretch.radix_keys)
        self._positions.add(stretch.positions + self.next_position)
        self.next_position += stretch.advance
        segment.advance += stretch.advance
        segment.stop = len(self)
        self.version += 1

    # ------------------------------------------------------------ asking

    def request(
        self,
        request_id: str,
        question: Stretch | None = None,
        *,
        sampling: SamplingParams | None = None,
        thinking: Thinking | None = None,
        **fields: Any,
    ) -> PreparedRequest:
        """The trunk as it stands with a ``question`` behind it; without one a warm request. ``fields`` are
        others of ``PreparedRequest``."""
        ids, keys, positions = self._ids.view(), self._keys.view(), self._positions.view()
        items, position = tuple(self.items()), self.next_position
        if question is not None:
            ids = _frozen(np.concatenate((ids, question.token_ids)))
            keys = _frozen(np.concatenate((keys, question.radix_keys)))
            positions = _frozen(np.concatenate((positions, question.positions + np.int32(position)), axis=1))
            items += tuple(_moved(item, len(self)) for item in question.items)
            position += question.advance
        return PreparedRequest(
            request_id=request_id,
            token_ids=ids,
            radix_keys=keys,
            positions=positions,
            position_delta=position - len(ids),
            items=items,
            sampling=sampling or SamplingParams(),
            cache_salt=self.salt,
            thinking=thinking,
            warm=question is None,
            **fields,
        )

    def stretches(self) -> Iterator[tuple[Segment, Stretch]]:
        """All segments but the head, each as it is by itself."""
        ids, keys, positions = self._ids.view(), self._keys.view(), self._positions.view()
        for segment in self.segments[1:]:
            a, b = segment.start, segment.stop
            alone = positions[:, a:b] - np.int32(segment.position)
            laid = (ids[a:b], keys[a:b], alone, segment.advance, segment.items, segment.sources)
            yield segment, Stretch(*laid)

    def items(self) -> Iterator[VisionItem]:
        """All items, their spans counted from the trunk's beginning."""
        for segment in self.segments:
            for item in segment.items:
                yield _moved(item, segment.start)

    def forget_pixels(self, last: int) -> None:
        """The engine has had the pixels of the segments up to number ``last``; what it drops can be made
        again from their sources."""
        for segment in self.segments:
            if segment.number <= last and any(item.pixels is not None for item in segment.items):
                segment.items = tuple(replace(item, pixels=None) for item in segment.items)

    def sources(self) -> list[Source]:
        return [source for segment in self.segments for source in segment.sources]

    # ------------------------------------------------------------ dropping

    def drop(self, numbers: Collection[int], *, rebase: bool = False) -> CarryOver | None:
        """Drop the segments with these ``numbers``; survivors keep their positions. With ``rebase`` all but
        the head move back as far as they can, by one constant. None where nothing changes.

        What is returned has the engine carry over what it holds of the survivors.
        """
        head, *rest = self.segments
        assert head.number not in numbers, "the head stays"
        kept = [segment for segment in rest if segment.number not in numbers]
        shift = self._gap(head, kept) if rebase else 0
        if len(kept) == len(rest) and not shift:
            return None
        ranges = _joined([head, *kept], split_after_head=shift > 0)
        order = CarryOver(
            keys=self.keys,
            kept=ranges,
            salt=self.salt,
            new_salt=self._next_salt(),
            shift=shift,
            head=1,
            retire=self.epoch > 0,
        )
        self._keep([head, *kept], shift)
        self.salt = order.new_salt
        return order

    def rebase(self) -> CarryOver | None:
        """Move all but the head back; see ``drop``."""
        return self.drop((), rebase=True)

    def _gap(self, head: Segment, kept: Sequence[Segment]) -> int:
        """Positions between the head and the first that is kept."""
        behind = int(self._positions.view()[:, : head.stop].max()) + 1 if head.stop else 0
        return (kept[0].position if kept else self.next_position) - behind

    def _next_salt(self) -> str:
        return f"{self._secret}.{self.epoch + 1}"

    def _keep(self, kept: list[Segment], shift: int) -> None:
        ids, keys, positions = self._ids.view(), self._keys.view(), self._positions.view()
        self._ids, self._keys, self._positions = _Grown(np.int32), _Grown(np.int64), _Grown(np.int32, 3)
        for segment in kept:
            a, b = segment.start, segment.stop
            moved = shift if segment is not kept[0] else 0
            segment.start = len(self)
            self._ids.add(ids[a:b])
            self._keys.add(keys[a:b])
            self._positions.add(positions[:, a:b] - np.int32(moved))
            segment.stop, segment.position = len(self), segment.position - moved
        self.segments = kept
        self.next_position -= shift
        self.epoch += 1
        self.version += 1


class _Grown:
    """An array [n] or [rows, n] that grows at its end; views of it never change."""

    def __init__(self, dtype: Any, rows: int | None = None) -> None:
        self._shape = () if rows is None else (rows,)
        self._data = np.empty((*self._shape, 256), dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, values: np.ndarray) -> None:
        count = self._count + values.shape[-1]
        if count > self._data.shape[-1]:
            larger = np.empty((*self._shape, max(count, 2 * self._data.shape[-1])), self._data.dtype)
            larger[..., : self._count] = self._data[..., : self._count]
            self._data = larger
        self._data[..., self._count : count] = values
        self._count = count

    def view(self) -> np.ndarray:
        return _frozen(self._data[..., : self._count])


def _frozen(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.setflags(write=False)
    return array


def _moved(item: VisionItem, by: int) -> VisionItem:
    return replace(item, span=(item.span[0] + by, item.span[1] + by))


def _joined(segments: Sequence[Segment], *, split_after_head: bool) -> tuple[tuple[int, int], ...]:
    """Token ranges of ``segments``, neighbours joined; the head alone where it does not move as others do."""
    ranges: list[tuple[int, int]] = []
    for index, segment in enumerate(segments):
        joins = ranges and ranges[-1][1] == segment.start and not (split_after_head and index == 1)
        if joins:
            ranges[-1] = (ranges[-1][0], segment.stop)
        else:
            ranges.append((segment.start, segment.stop))
    return tuple(ranges)


def _nbytes(part: MediaPart) -> int:
    data = [getattr(part, name, None) for name in ("data", "pixels", "frames", "kept")]
    sizes = [len(d) if isinstance(d, bytes) else d.nbytes for d in data if d is not None]
    return sum(sizes) + sum(map(len, getattr(part, "pictures", None) or ()))
