"""Where vision items stand in a prompt: placeholders expanded, spans, keys of the prefix tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from mmserve.core.digest import framed_digest
from mmserve.core.errors import InvalidRequest
from mmserve.preprocess.media import Kind, Medium
from mmserve.preprocess.positions import Block
from mmserve.preprocess.spec import ProcessorSpec

KEY_FLAG = np.uint64(1 << 62)  # set in every key under an item; token ids are far below
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64 (Steele, Lea, Flood 2014)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Layout:
    """``token_ids`` int32 [N]; ``spans[m][i]``: token range of item i of medium m; position blocks."""

    token_ids: np.ndarray
    spans: tuple[tuple[tuple[int, int], ...], ...]
    blocks: tuple[Block, ...]


def lay_out(
    ids: Sequence[int], media: Sequence[Medium], spec: ProcessorSpec, encode: Callable[[str], list[int]]
) -> Layout:
    """Give each placeholder in ``ids`` its medium's tokens; the n-th image placeholder is the n-th image.

    An image takes one pad for each merged token, an item of a clip one for each cell that is kept. A clip of
    the older families takes one block of pads. In Qwen3-VL each frame pair follows its time:
    ``<1.5 seconds>``, start, pads, end, and these replace the clip's placeholder together with the start and
    end around it (as in the models' first release and in vLLM; transformers 5.24 keeps the outer pair too).
    """
    writer = _Writer(spec, encode)
    waiting = {kind: [m for m in range(len(media)) if media[m].kind == kind] for kind in ("image", "video")}
    kinds: dict[int, Kind] = {spec.tokens.image: "image", spec.tokens.video: "video"}
    _check_counts(ids, kinds, waiting)
    spans: list[tuple[tuple[int, int], ...]] = [()] * len(media)
    done = 0
    for place in (i for i, token in enumerate(ids) if token in kinds):
        m = waiting[kinds[ids[place]]].pop(0)
        writer.text(ids[done:place])
        done = place + 1
        if spec.family == "qwen3_vl" and media[m].kind == "video":
            done += writer.drop_marks(ids, place)
        spans[m] = writer.medium(media[m])
    writer.text(ids[done:])
    return Layout(np.array(writer.ids, np.int32), tuple(spans), tuple(writer.blocks))


def radix_keys(layout: Layout, media: Sequence[Medium]) -> np.ndarray:
    """int64 [N]: the token ids, except under an item, where they come from its digest and its time step.

    The time step is there because two clips of equal pixels at different rates have different positions.
    """
    keys = layout.token_ids.astype(np.int64)
    clocks = {block.start: block.clock() for block in layout.blocks}
    for medium, spans in zip(media, layout.spans, strict=True):
        clock = clocks[spans[0][0]]
        for i, (digest, (start, end)) in enumerate(zip(medium.digests, spans, strict=True)):
            step = int(clock[i]) if len(clock) > 1 else 0
            keys[start:end] = item_keys(digest, end - start, step)
    return keys


def item_keys(digest: bytes, count: int, step: int = 0) -> np.ndarray:
    """``count`` keys in [2^62, 2^63), int64; any four neighbours carry 248 bits of the digest."""
    words = np.frombuffer(framed_digest(digest, step), "<u8")
    offsets = np.arange(count, dtype=np.uint64)
    mixed = words[offsets % np.uint64(4)] + (offsets + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX2
    mixed ^= mixed >> np.uint64(31)
    keys: np.ndarray = ((mixed >> np.uint64(2)) | KEY_FLAG).astype(np.int64)
    return keys


def _check_counts(ids: Sequence[int], kinds: dict[int, Kind], waiting: dict[str, list[int]]) -> None:
    for token, kind in kinds.items():
        places, given = sum(i == token for i in ids), len(waiting[kind])
        if places != given:
            raise InvalidRequest(
                f"the prompt has {places} {kind} placeholders for {given} {kind}s given;"
                " does the model's chat template take them in that turn?",
                param="messages",
            )


class _Writer:
    """The prompt as it grows."""

    def __init__(self, spec: ProcessorSpec, encode: Callable[[str], list[int]]) -> None:
        self.spec = spec
        self.encode = encode
        self.ids: list[int] = []
        self.blocks: list[Block] = []

    def text(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)

    def drop_marks(self, ids: Sequence[int], place: int) -> int:
        """Forget the start mark just written if an end mark follows; the number of tokens to skip."""
        tokens = self.spec.tokens
        wrapped = self.ids[-1:] == [tokens.vision_start] and list(ids[place + 1 : place + 2]) == [
            tokens.vision_end
        ]
        if wrapped:
            self.ids.pop()
        return int(wrapped)

    def medium(self, medium: Medium) -> tuple[tuple[int, int], ...]:
        if medium.kind == "video" and self.spec.family == "qwen3_vl":
            return tuple(self._timed_item(medium, i) for i in range(len(medium.pixels)))
        return self._block(medium)

    def _timed_item(self, medium: Medium, i: int) -> tuple[int, int]:
        tokens = self.spec.tokens
        self.text(self.encode(f"<{medium.timestamps[i]:.1f} seconds>"))
        self.text([tokens.vision_start])
        start = len(self.ids)
        block = Block(start, (1, *self._merged(medium)), kept=(medium.kept_of(i),))
        self.blocks.append(block)
        self.text([tokens.video] * block.count)
        self.text([tokens.vision_end])
        return start, start + block.count

    def _block(self, medium: Medium) -> tuple[tuple[int, int], ...]:
        start, items = len(self.ids), len(medium.pixels)
        block = Block(start, (items, *self._merged(medium)), self._interval(medium), medium.kept)
        self.blocks.append(block)
        pad = self.spec.tokens.image if medium.kind == "image" else self.spec.tokens.video
        self.text([pad] * block.count)
        stops = [start + stop for stop in accumulate(block.counts)]
        return tuple(pairwise((start, *stops)))

    def _merged(self, medium: Medium) -> tuple[int, int]:
        return medium.grid[0] // self.spec.merge, medium.grid[1] // self.spec.merge

    def _interval(self, medium: Medium) -> float:
        if medium.kind == "image" or self.spec.family != "qwen2_5_vl":
            return 1.0
        return float(np.float32(self.spec.tokens_per_second) * np.float32(medium.seconds_per_grid))
