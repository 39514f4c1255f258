"""Encoded files and raw pixels of a part, on their way through the arena."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from mmserve.core.arena import Window
from mmserve.core.errors import MediaError
from mmserve.preprocess.media import MediaPart
from mmserve.preprocess.pool.messages import Bulk

FILE, FILES, ARRAYS = "data", "pictures", ("pixels", "frames", "reference")


@dataclass(frozen=True)
class Luggage:
    """The bulk of a part: per entry its field, its bytes, and a shape if it is an array."""

    entries: tuple[tuple[str, bytes | memoryview, tuple[int, ...] | None], ...]

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data, _ in self.entries)

    def places(self, offset: int) -> tuple[Bulk, ...]:
        """Where each entry stands when they are written one behind the other from ``offset``."""
        found = []
        for field, data, shape in self.entries:
            found.append(Bulk(field, offset, len(data), shape))
            offset += len(data)
        return tuple(found)


def luggage(part: MediaPart) -> Luggage:
    """What is too large for a message. MediaError if it is pixels of another kind than uint8."""
    fields = structs.asdict(part)
    entries: list[tuple[str, Any, tuple[int, ...] | None]] = []
    if fields[FILE] is not None:
        entries.append((FILE, fields[FILE], None))
    entries += [(FILES, data, None) for data in fields.get(FILES) or ()]
    for name in ARRAYS:
        if fields.get(name) is not None:
            entries.append((name, _flat(fields[name], name), fields[name].shape))
    return Luggage(tuple(entries))


def unloaded(part: MediaPart) -> MediaPart:
    """A part without its bulk."""
    fields = structs.asdict(part)
    heavy = [name for name in (FILE, FILES, *ARRAYS) if fields.get(name) is not None]
    return structs.replace(part, **dict.fromkeys(heavy))


def loaded(part: MediaPart, bulk: Sequence[Bulk], window: Window) -> MediaPart:
    """The part again: arrays are read-only views of the arena, files are copied out of it.

    The copy is the one that reading a file from memory takes anyway: ``io.BytesIO`` shares bytes, but
    copies any other buffer.
    """
    fields: dict[str, Any] = {}
    for entry in bulk:
        if entry.shape is not None:
            fields[entry.field] = _pixels(window, entry.offset, entry.shape)
            continue
        file = bytes(window.memory(entry.offset, entry.nbytes))
        fields[entry.field] = (*fields.get(FILES, ()), file) if entry.field == FILES else file
    return structs.replace(part, **fields)


def _pixels(window: Window, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    pixels = window.array(offset, shape)
    pixels.setflags(write=False)
    return pixels


def _flat(array: np.ndarray, name: str) -> memoryview:
    if array.dtype != np.uint8:
        raise MediaError(f"{name} must be uint8, not {array.dtype}")
    return np.ascontiguousarray(array).reshape(-1).data
