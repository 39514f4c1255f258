"""Frames on their way to vision items: one allocation that they fill from the front."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from mmserve.core.messages import Seen, VideoPart
from mmserve.preprocess.budget import clip_size
from mmserve.preprocess.media import Medium, item_digest
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
        kept = tuple(self.times)
        spare = -len(kept) % step
        times = [*kept, *kept[-1:] * spare]
        pixels = self._pixels[: len(times)]
        pixels[len(kept) :] = pixels[len(kept) - 1]
        pixels.setflags(write=False)
        items = tuple(pixels[i : i + step] for i in range(0, len(times), step))
        with self.work.stages.timing("digest"):
            digests = tuple(item_digest(item, self.spec) for item in items)
        grid = (pixels.shape[1] // self.spec.patch, pixels.shape[2] // self.spec.patch)
        return Medium(
            kind="video",
            grid=grid,
            pixels=items,
            digests=digests,
            timestamps=tuple((times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)),
            seconds_per_grid=step / (len(kept) / total * rate),
            seen=Seen(
                kind="video",
                format=format,
                source_size=self.source_size,
                size=(pixels.shape[1], pixels.shape[2]),
                grid=grid,
                tokens=len(items) * grid[0] * grid[1] // self.spec.merge**2,
                timestamps=kept,
                warnings=tuple(warnings),
            ),
        )
