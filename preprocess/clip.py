"""Frames on their way to vision items: one allocation that they fill from the front."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from mmserve.core.errors import MediaError
from mmserve.core.messages import Seen, VideoPart
from mmserve.preprocess.budget import clip_size
from mmserve.preprocess.media import Medium, item_digest
from mmserve.preprocess.pruning import prune
from mmserve.preprocess.resize import resize_into
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.work import Work


class Clip:
    """``planned`` frames of one size, resized as they come.

        pixels [planned, rounded up to whole pairs]   [0, n) filled, n = len(times)

    The memory is asked for once, when the first frame tells the size. When fewer frames come than were
    planned, the leading part is used. The items' pixels are views of it.
    """

    def __init__(self, part: VideoPart, spec: ProcessorSpec, work: Work, planned: int) -> None:
        self.part = part
        self.spec = spec
        self.work = work
        self.planned = planned
        self.source_size = (0, 0)
        self.times: list[float] = []
        self._pixels: np.ndarray | None = None

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of frames after the resize. MediaError if the model cannot take such a clip."""
        return clip_size(self.planned, height, width, self.spec, self.part.min_pixels, self.part.max_pixels)

    def add(self, picture: Image.Image, time: float, stretch: float = 1.0) -> None:
        """The next frame, RGB and upright; ``stretch`` is a pixel's width over its height."""
        self.work.check()
        if self._pixels is None:
            self.source_size = (picture.height, picture.width)
            size = self.size(picture.height, max(1, round(picture.width * stretch)))
            padded = self.planned + -self.planned % self.spec.temporal_patch
            self._pixels = self.work.allocate((padded, *size, 3))
        with self.work.stages.timing("resize"):
            resize_into(picture, self._pixels[len(self.times)])
        self.times.append(time)

    def restart(self) -> None:
        """Forget the frames; the memory stays."""
        self.times.clear()

    def finish(self, format: str, rate: float, total: int, warnings: Sequence[str]) -> Medium:
        """Pair the frames (the last one repeated where one is missing); a pair's time is the mean of its own.

        ``rate`` and ``total`` are of the clip before it was sampled. At least one frame must be there.
        """
        assert self._pixels is not None
        step = self.spec.temporal_patch
        shown = tuple(self.times)
        spare = -len(shown) % step
        times = [*shown, *shown[-1:] * spare]
        pixels = self._pixels[: len(times)]
        pixels[len(shown) :] = pixels[len(shown) - 1]
        pixels.setflags(write=False)
        items = tuple(pixels[i : i + step] for i in range(0, len(times), step))
        grid = (pixels.shape[1] // self.spec.patch, pixels.shape[2] // self.spec.patch)
        cells = grid[0] * grid[1] // self.spec.merge**2
        kept, reference = self._kept(items, cells)
        with self.work.stages.timing("digest"):
            digests = tuple(item_digest(item, self.spec, own) for item, own in zip(items, kept, strict=True))
        tokens = sum(cells if own is None else len(own) for own in kept)
        return Medium(
            kind="video",
            grid=grid,
            pixels=items,
            digests=digests,
            timestamps=tuple((times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)),
            seconds_per_grid=step / (len(shown) / total * rate),
            kept=kept if any(own is not None for own in kept) else (),
            reference=reference,
            seen=Seen(
                kind="video",
                format=format,
                source_size=self.source_size,
                size=(pixels.shape[1], pixels.shape[2]),
                grid=grid,
                tokens=tokens,
                dropped_tokens=len(items) * cells - tokens,
                timestamps=shown,
                warnings=tuple(warnings),
            ),
        )

    def _kept(
        self, items: Sequence[np.ndarray], cells: int
    ) -> tuple[tuple[np.ndarray | None, ...], np.ndarray | None]:
        """The cells of each item that become tokens, None for all; and what a next item is pruned against."""
        part, rate = self.part, self.part.video_pruning_rate
        if part.kept is not None:
            return (_checked(part.kept, len(items), cells),), None
        if not rate:
            return (None,) * len(items), None
        with self.work.stages.timing("prune"):
            pruned = prune(items, self.spec, rate, part.reference)
        return pruned.kept, pruned.reference if len(items) == 1 else None


def _checked(kept: np.ndarray, items: int, cells: int) -> np.ndarray:
    """Cells that were chosen before, for a clip of one item with so many."""
    ascending = kept.ndim == 1 and len(kept) > 0 and bool((np.diff(kept) > 0).all())
    if items != 1 or not ascending or kept[0] < 0 or kept[-1] >= cells:
        raise MediaError(f"these cells were not chosen of a clip of one item of {cells} cells")
    return kept.astype(np.int32)
