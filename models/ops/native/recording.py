"""A forward that is recorded once and made again by few calls: on a CPU, what a CUDA graph is on a GPU.

Between the kernels of a decode step Python takes longer than they do for one row: what it needs has been
driven out of the cache by the weights each time. A recording has the kernels' calls as words, and C++ goes
through them (``replay.cpp``).
"""

import ctypes
import struct
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmserve.models.ops.native import library

ALIGNMENT = 64  # of what is in a recording's memory: a line of the cache
_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_here = threading.local()  # ``recording``: the one under way in this thread

Value = int | float | None


class NotRecordable(Exception):
    """A forward does what depends on more than its buffers; the message tells what."""


class Kernel:
    """The function ``name`` of a native library, which a recording under way in this thread notes.

    Pointers are told as numbers: what they point at must stay where it is while a recording is used.
    """

    def __init__(self, native: ctypes.CDLL, name: str, *arguments: type, result: type | None = None) -> None:
        self.name = name
        self._function = native[name]
        self._function.argtypes, self._function.restype = arguments, result
        self._arguments = arguments
        self.entry = ctypes.cast(getattr(native, f"{name}_recorded"), ctypes.c_void_p).value

    def __call__(self, *values: Value) -> Any:
        recording: Recording | None = getattr(_here, "recording", None)
        if recording is not None:
            recording.called(self, values)
        return self._function(*values)

    def pointers(self, values: Sequence[Value]) -> Iterable[tuple[int, int]]:
        """(place, address) of those among ``values`` that point at something."""
        for place, (kind, value) in enumerate(zip(self._arguments, values, strict=True)):
            if kind is ctypes.c_void_p and isinstance(value, int) and value:
                yield place, value

    def words(self, values: Sequence[Value]) -> bytes:
        """``values`` as recorded.h reads them."""
        reals = (kind is ctypes.c_float for kind in self._arguments)
        return b"".join(
            struct.pack("<f4x", value) if real else struct.pack("<q", value or 0)
            for real, value in zip(reals, values, strict=True)
        )


class Call(NamedTuple):
    kernel: Kernel
    values: tuple[Value, ...]


class Recording:
    """``forward`` as it ran in the constructor, to be run again over the same buffers by ``replay``.

    Of torch's operations, allocations are made once, views are what they were, and all others are made again
    into the memory of their first result. What Python decides, and what numpy reads, is frozen. NotRecordable
    for a number that is read out of a tensor.

    Memory: what torch operations take and give, and what is still held when ``forward`` has returned, stays
    where it was. All else is known to kernels alone; it is moved into ``memory``, where what is not needed at
    the same time shares a place.
    """

    def __init__(self, forward: Callable[[], None]) -> None:
        self._steps: list[Call | Callable[[], None]] = []
        self._storages: dict[
            int, torch.UntypedStorage
        ] = {}  # so that nobody else gets their memory meanwhile
        self._tensors: list[
            tuple[weakref.ref[torch.Tensor], int]
        ] = []  # all that were made, and where they lie
        if getattr(_here, "recording", None) is not None:
            raise NotRecordable("another recording is under way")
        _here.recording = self
        try:
            with _Watch(self):
                forward()
        finally:
            _here.recording = None
        self.memory = self._move()
        self._parts = list(_joined(self._steps))
        self.kernels = sum(isinstance(step, Call) for step in self._steps)
        self.operations = len(self._steps) - self.kernels
        self._steps.clear()
        self._tensors.clear()

    def replay(self) -> None:
        """RuntimeError where a kernel says that it could not."""
        for part in self._parts:
            part()

    # ------------------------------------------------------------ what is told while it records

    def called(self, kernel: Kernel, values: tuple[Value, ...]) -> None:
        self._steps.append(Call(kernel, values))

    def computed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """torch did ``function``, with this result."""
        leaves = tree_leaves(result)
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._tensors += [(weakref.ref(tensor), _address(tensor)) for tensor in made]
        if function.overloadpacket.__name__ in _ALLOCATIONS:
            self._storages.update((s.data_ptr(), s) for s in (t.untyped_storage() for t in made))
        elif function._schema.is_mutable:
            self._steps.append(lambda: function(*args, **kwargs))
        elif len(made) < len(leaves):
            raise NotRecordable(f"{function} reads a number out of a tensor")
        elif not _views(made, (args, kwargs)):
            self._steps.append(lambda: _again(function, args, kwargs, made))

    # ------------------------------------------------------------ memory

    def _move(self) -> torch.Tensor:
        """Give what kernels alone know its place in new memory, uint8 [n], and change their calls."""
        held = {address for tensor, address in self._tensors if tensor() is not None}
        starts = sorted(address for address in self._storages if address and address not in held)
        ends = [start + self._storages[start].nbytes() for start in starts]
        used: dict[int, tuple[int, int]] = {}  # first and last step, by start
        places: list[tuple[int, int, int]] = []  # (step, place of the value, start)
        for order, step in enumerate(self._steps):
            for place, address in step.kernel.pointers(step.values) if isinstance(step, Call) else ():
                index = bisect_right(starts, address) - 1
                if index >= 0 and address < ends[index]:
                    start = starts[index]
                    used[start] = (used.get(start, (order, order))[0], order)
                    places.append((order, place, start))
        sizes = {start: self._storages[start].nbytes() for start in used}
        offsets, total = _packed(used, sizes)
        memory = torch.empty(total + ALIGNMENT, dtype=torch.uint8)
        base = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        for order, place, start in places:
            call = self._steps[order]
            assert isinstance(call, Call)
            values = list(call.values)
            values[place] = values[place] - start + base + offsets[start]  # type: ignore[operator]
            self._steps[order] = call._replace(values=tuple(values))
        self._storages = {address: self._storages[address] for address in held & self._storages.keys()}
        return memory


def _packed(used: dict[int, tuple[int, int]], sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """An offset for each, such that no two overlap that are used at the same time; and the end of all."""
    offsets: dict[int, int] = {}
    for start, (first, _) in sorted(used.items(), key=lambda item: item[1]):
        beside = sorted(
            (offset, offset + sizes[other]) for other, offset in offsets.items() if used[other][1] >= first
        )
        at = 0
        for begin, end in beside:
            if begin - at >= sizes[start]:
                break
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[start] = at
    return offsets, max((at + sizes[start] for start, at in offsets.items()), default=0)


def _joined(steps: Iterable[Call | Callable[[], None]]) -> Iterable[Callable[[], None]]:
    """Calls of kernels that follow each other as one."""
    for together, group in groupby(steps, lambda step: isinstance(step, Call)):
        if together:
            yield _Run([step for step in group if isinstance(step, Call)])
        else:
            yield from (step for step in group if not isinstance(step, Call))


class _Run:
    """Calls of kernels, one behind the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._names = [call.kernel.name for call in calls]
        told = [call.kernel.words(call.values) for call in calls]
        self._words = [ctypes.create_string_buffer(words, len(words)) for words in told]
        entries = [
            (call.kernel.entry, ctypes.addressof(w)) for call, w in zip(calls, self._words, strict=True)
        ]
        self._calls = (ctypes.c_void_p * (2 * len(entries)))(*(word for entry in entries for word in entry))
        self._replay = library.load("replay").replay
        self._replay.argtypes, self._replay.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64

    def __call__(self) -> None:
        done = self._replay(self._calls, len(self._names))
        if done < len(self._names):
            raise RuntimeError(f"{self._names[done]} of a recorded forward failed")


class _Watch(TorchDispatchMode):
    """Tells ``recording`` of all that torch does."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recording.computed(func, args, kwargs or {}, result)
        return result


def _views(made: Iterable[torch.Tensor], given: Any) -> bool:
    """Whether all that was made lies where something that was given does."""
    addresses = {_address(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)} - {0}
    return all(_address(tensor) in addresses for tensor in made)


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 for a weight in a form of oneDNN's own, which tells nobody."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _again(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: Iterable[torch.Tensor]
) -> None:
    made = (leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor))
    for target, value in zip(into, made, strict=True):
        target.copy_(value)
