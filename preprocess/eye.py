"""One picture or clip to vision items."""

from dataclasses import replace

import numpy as np
from msgspec import structs

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.core.messages import ImagePart, Seen, VideoPart
from mmserve.preprocess.budget import check_pixel_limits, image_size
from mmserve.preprocess.image import Picture, background_color, decode_image, from_pixels
from mmserve.preprocess.luma import luma_of_file
from mmserve.preprocess.media import MediaPart, Medium, item_digest, naming
from mmserve.preprocess.resize import resize_into
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.video import read_video
from mmserve.preprocess.work import Work


class Eye:
    """Decodes and resizes for one model. It holds nothing of what it saw; safe from many threads."""

    def __init__(self, spec: ProcessorSpec, media: MediaOptions) -> None:
        self.spec = spec
        self.media = media
        background_color(media)

    def see(self, part: MediaPart, work: Work | None = None) -> Medium:
        """Decode and resize one part, into memory that ``work`` gives; errors carry the part's ``param``."""
        work = work or Work()
        if isinstance(part, VideoPart) and part.video_pruning_rate is None:
            part = structs.replace(part, video_pruning_rate=self.media.video_pruning_rate)
        with naming(part.param):
            check_pixel_limits(part.min_pixels, part.max_pixels)
            medium = self._look(part, work)
        return replace(medium, stages=work.stages.seconds)

    def glance(self, data: bytes) -> np.ndarray:
        """The luma thumbnail of an encoded picture, uint8 [h, w] (see ``luma_of_file``)."""
        return luma_of_file(data, self.media)

    def _look(self, part: MediaPart, work: Work) -> Medium:
        if isinstance(part, VideoPart):
            return read_video(part, self.spec, self.media, work)
        with work.stages.timing("decode"):
            picture = self._picture(part)
        work.check()
        return self._still(picture, part, work)

    def _picture(self, part: ImagePart) -> Picture:
        if part.data is not None:
            return decode_image(part.data, self.media, part.background)
        if part.pixels is not None:
            return from_pixels(part.pixels, self.media)
        raise MediaError("the image part has neither data nor pixels")

    def _still(self, picture: Picture, part: ImagePart, work: Work) -> Medium:
        spec = self.spec
        ceiling = self.media.max_image_pixels
        size = image_size(*picture.size, spec, part.min_pixels, part.max_pixels, ceiling)
        pixels = work.allocate((1, *size, 3))
        with work.stages.timing("resize"):
            resize_into(picture.image, pixels[0])
        pixels.setflags(write=False)
        with work.stages.timing("digest"):
            digest = item_digest(pixels, spec)
        grid = (size[0] // spec.patch, size[1] // spec.patch)
        seen = Seen(
            kind="image",
            format=picture.format,
            source_size=picture.size,
            size=size,
            grid=grid,
            tokens=grid[0] * grid[1] // spec.merge**2,
            orientation=picture.orientation,
        )
        return Medium("image", grid, (pixels,), (digest,), seen)
